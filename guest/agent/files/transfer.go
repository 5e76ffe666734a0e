package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/internal/flow"
	"github.com/drowse-vm/drowse/guest/internal/treetar"
	"github.com/drowse-vm/drowse/internal/osfile"
)

// transfer is one Transfer stream.
type transfer struct {
	stream     agentpb.Agent_TransferServer
	ctx        context.Context
	cancel     context.CancelCauseFunc
	*flow.Pipe // to and from the host; it ends when the host has sent everything
}

// errEnded means that the host has sent everything.
var errEnded = errors.New("the session has ended")

// Transfer implements agentpb.AgentService.
func (f *Files) Transfer(ctx context.Context, stream agentpb.Agent_TransferServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	t := &transfer{stream: stream}
	t.ctx, t.cancel = context.WithCancelCause(ctx)
	t.Pipe = flow.NewPipe(t.ctx, t.ctx, func(data []byte) error {
		return stream.Send(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Data{Data: data}})
	}, func(n uint64) error {
		return stream.Send(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Ack{Ack: n}})
	})
	defer t.cancel(errEnded)
	go func() { t.cancel(t.receive()) }()

	var done *agentpb.TransferDone
	switch m := first.Msg.(type) {
	case *agentpb.TransferRequest_Read:
		done, err = t.readFile(m.Read)
	case *agentpb.TransferRequest_Write:
		done, err = t.writeFile(m.Write)
	case *agentpb.TransferRequest_Pack:
		done, err = t.pack(m.Pack, false)
	case *agentpb.TransferRequest_Unpack:
		done, err = t.unpack(m.Unpack, false)
	case *agentpb.TransferRequest_ResumePack:
		done, err = t.pack(m.ResumePack, true)
	case *agentpb.TransferRequest_ResumeUnpack:
		done, err = t.unpack(m.ResumeUnpack, true)
	default:
		err = status.Error(codes.InvalidArgument, agentpb.NoTransfer)
	}
	if err != nil {
		if cause := context.Cause(t.ctx); cause != nil && errors.Is(err, context.Canceled) {
			return cause
		}
		return err
	}
	f.settle()
	return stream.Send(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Done{Done: done}})
}

// receive handles what the host sends. It always returns an error.
func (t *transfer) receive() error {
	for {
		m, err := t.stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = errEnded
			}
			return err
		}
		switch m := m.Msg.(type) {
		case *agentpb.TransferRequest_Ack:
			if err := t.Ack(m.Ack); err != nil {
				return status.Error(codes.InvalidArgument, err.Error())
			}
		case *agentpb.TransferRequest_Data:
			if !t.Put(m.Data) {
				return status.Errorf(codes.ResourceExhausted, "more than %d data messages unacknowledged", agentpb.Window)
			}
		case *agentpb.TransferRequest_End:
			t.End()
		default:
			return status.Errorf(codes.InvalidArgument, "unexpected message %T in a transfer", m)
		}
	}
}

func (t *transfer) readFile(m *agentpb.ReadFile) (*agentpb.TransferDone, error) {
	if err := checkPath(m.Path); err != nil {
		return nil, err
	}
	if m.Offset < 0 || m.Length < 0 {
		return nil, status.Errorf(codes.InvalidArgument, "offset %d, length %d", m.Offset, m.Length)
	}
	f, err := os.Open(m.Path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := statFile(m.Path, true)
	if err != nil {
		return nil, err
	}
	if info.Mode&unix.S_IFMT == unix.S_IFDIR {
		return nil, &os.PathError{Op: "read", Path: m.Path, Err: unix.EISDIR}
	}
	if m.Offset > 0 {
		if _, err := f.Seek(m.Offset, io.SeekStart); err != nil {
			return nil, err
		}
	}
	if err := t.stream.Send(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Info{Info: info}}); err != nil {
		return nil, err
	}
	var r io.Reader = f
	if m.Length > 0 {
		r = io.LimitReader(f, m.Length)
	}
	n, err := io.CopyBuffer(struct{ io.Writer }{t}, struct{ io.Reader }{r}, make([]byte, agentpb.MaxChunk))
	return &agentpb.TransferDone{Bytes: n, Entries: 1}, err
}

const defaultFileMode = 0o644

func (t *transfer) writeFile(m *agentpb.WriteFile) (*agentpb.TransferDone, error) {
	if err := checkPath(m.Path); err != nil {
		return nil, err
	}
	if m.Offset < 0 || m.Atomic && (m.Offset > 0 || m.Append) || m.Offset > 0 && m.Append {
		return nil, status.Error(codes.InvalidArgument, "offset, append and atomic exclude each other")
	}
	if err := checkAttributes(m.Attributes); err != nil {
		return nil, err
	}
	if m.Parents {
		if err := os.MkdirAll(filepath.Dir(m.Path), defaultDirMode); err != nil {
			return nil, err
		}
	}
	mode := os.FileMode(m.Mode & 0o777)
	if mode == 0 {
		mode = defaultFileMode
	}
	var n int64
	fill := func(f *os.File) (err error) {
		n, err = io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{t}, make([]byte, agentpb.MaxChunk))
		if err == nil && m.Owner != nil {
			err = f.Chown(int(m.Owner.Uid), int(m.Owner.Gid))
		}
		if err == nil && m.Attributes != nil {
			err = setAttributes(f, m.Attributes)
		}
		return err
	}
	var err error
	if m.Atomic {
		err = osfile.Replace(m.Path, mode, fill)
	} else {
		err = writeInPlace(m, mode, fill)
	}
	if err == nil && m.MtimeNanos != 0 {
		mtime := time.Unix(0, m.MtimeNanos)
		err = os.Chtimes(m.Path, time.Time{}, mtime)
	}
	return &agentpb.TransferDone{Bytes: n, Entries: 1}, err
}

// writeInPlace opens the file itself and has fill write it, so that it keeps its name meanwhile.
func writeInPlace(m *agentpb.WriteFile, mode os.FileMode, fill func(*os.File) error) error {
	flags := os.O_WRONLY | os.O_CREATE
	switch {
	case m.Append:
		flags |= os.O_APPEND
	case m.Offset == 0:
		flags |= os.O_TRUNC
	}
	f, err := os.OpenFile(m.Path, flags, mode)
	if err != nil {
		return err
	}
	if m.Offset > 0 {
		_, err = f.Seek(m.Offset, io.SeekStart)
	}
	if err == nil && m.Mode != 0 { // regardless of the umask and an existing file's mode
		err = f.Chmod(mode)
	}
	if err == nil {
		err = fill(f)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

func (t *transfer) pack(m *agentpb.Pack, resume bool) (*agentpb.TransferDone, error) {
	if err := checkPath(m.Path); err != nil {
		return nil, err
	}
	path := filepath.Clean(m.Path)
	info, err := statFile(path, true)
	if err != nil {
		return nil, err
	}
	if err := t.stream.Send(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Info{Info: info}}); err != nil {
		return nil, err
	}
	name := filepath.Base(path)
	if path == "/" {
		name = "root"
	}
	// A link that the caller names is followed; links inside the tree are not.
	src, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, err
	}
	var res treetar.Result
	if resume {
		res, err = treetar.PackResumed(t.ctx, t, src, name)
	} else {
		res, err = treetar.Pack(t.ctx, t, src, name)
	}
	return &agentpb.TransferDone{Bytes: res.Bytes, Entries: res.Entries}, err
}

func (t *transfer) unpack(m *agentpb.Unpack, resume bool) (*agentpb.TransferDone, error) {
	if err := checkPath(m.Path); err != nil {
		return nil, err
	}
	if strings.ContainsAny(m.Marker, "/\x00") || len(m.Marker) > unix.NAME_MAX || m.Marker == "." || m.Marker == ".." {
		return nil, status.Errorf(codes.InvalidArgument, "a marker named %q", m.Marker)
	}
	if err := os.MkdirAll(m.Path, defaultDirMode); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(m.Path)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	o := treetar.Options{
		Limits:    treetar.Limits{Bytes: m.MaxBytes, Entries: m.MaxEntries},
		KeepOwner: true, KeepSetID: true, KeepLinks: true, Marker: m.Marker,
	}
	if m.Owner != nil {
		o.Owner = &treetar.Owner{UID: int(m.Owner.Uid), GID: int(m.Owner.Gid)}
	}
	var res treetar.Result
	if resume {
		res, err = treetar.UnpackResumed(t.ctx, t, root, o)
	} else {
		res, err = treetar.Unpack(t.ctx, t, root, o)
	}
	if err != nil {
		return nil, fmt.Errorf("unpack into %s: %w", m.Path, err)
	}
	return &agentpb.TransferDone{Bytes: res.Bytes, Entries: res.Entries}, nil
}
