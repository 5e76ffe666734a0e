package guest

import (
	"context"
	"io"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/audit"
)

// PackTree writes a file or tree of the guest to w as a tar stream, whose names begin with the last element of path.
// It returns how many bytes it wrote. The guest decides what the stream says and how long it is: whoever extracts it
// must expect any names and links.
func (c *Client) PackTree(ctx context.Context, path string, w io.Writer) (n int64, err error) {
	p, err := c.record(ctx, "copy from "+path, audit.Action{Kind: audit.KindCopyOut, Path: path})
	if err != nil {
		return 0, err
	}
	defer func() { p.End(audit.Outcome{BytesOut: n, Error: text(err)}) }()
	t, err := c.transfer(ctx, "copy from "+path, &agentpb.TransferRequest{Msg: &agentpb.TransferRequest_Pack{Pack: &agentpb.Pack{Path: path}}})
	if err != nil {
		return 0, err
	}
	defer t.close()
	err = t.converse(true, func(rw io.ReadWriter) (err error) {
		n, err = io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{rw}, make([]byte, agentpb.MaxChunk))
		return err
	})
	return n, t.fail(err)
}

// UnpackTree makes what a tar stream has below a directory of the guest, and the directory if it is missing. Of o it
// uses MaxBytes, MaxEntries and Owner. It returns how many bytes of the stream it sent. After an error a part is there.
func (c *Client) UnpackTree(ctx context.Context, dir string, r io.Reader, o CopyOptions) (n int64, err error) {
	p, err := c.record(ctx, "copy to "+dir, audit.Action{Kind: audit.KindCopyIn, Path: dir})
	if err != nil {
		return 0, err
	}
	defer func() { p.End(audit.Outcome{BytesIn: n, Error: text(err)}) }()
	owner := o.Owner
	if owner == nil {
		owner = &Owner{}
	}
	m := &agentpb.Unpack{Path: dir, Owner: owner.message(), MaxBytes: o.MaxBytes, MaxEntries: o.MaxEntries}
	t, err := c.transfer(ctx, "copy to "+dir, &agentpb.TransferRequest{Msg: &agentpb.TransferRequest_Unpack{Unpack: m}})
	if err != nil {
		return 0, err
	}
	defer t.close()
	err = t.converse(false, func(rw io.ReadWriter) (err error) {
		n, err = io.CopyBuffer(struct{ io.Writer }{rw}, struct{ io.Reader }{r}, make([]byte, agentpb.MaxChunk))
		if err == nil {
			err = t.sendEnd()
		}
		return err
	})
	return n, t.fail(err)
}
