package guest

import (
	"context"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/audit"
)

// ChangeOp says what happened to a path.
type ChangeOp string

// Values of ChangeOp.
const (
	PathAdded   ChangeOp = "added"
	PathChanged ChangeOp = "changed"
	PathRemoved ChangeOp = "removed" // with everything below it
)

// Change is one changed path on the guest's disk, as the guest reports it.
type Change struct {
	Op ChangeOp
	// Path is absolute and clean. It may contain any byte but zero: quote it before printing.
	Path string
	// Mode is kind and permissions, the former ones for PathRemoved. Before is the former mode, of PathChanged.
	Mode, Before fs.FileMode
	UID, GID     uint32
	Size         int64 // bytes, of regular files and symbolic links
	// From is the path in the image of a directory that was moved as a whole. Its contents are then not reported.
	From string
}

// ChangesEnd says how far Client.Changes got.
type ChangesEnd struct {
	Told int // how many changes the function got
	// More reports that there are more changes than the limit.
	More bool
	// Partial says which changes are unknown; "" if none are.
	Partial string
}

// maxChangePages bounds the answers of one Client.Changes.
const maxChangePages = 1 << 16

// Changes calls f for each path that differs between the guest's root and its image, up to limit paths: a directory
// before its contents, siblings in the byte order of their names. The answer comes in parts, so f may see a path
// that changes meanwhile as it was or is. The guest makes one or two system calls for each file written since the
// image was made; the host holds one part. Other mounts (/proc, /run, /dev/shm, volumes) are not included.
func (c *Client) Changes(ctx context.Context, limit int, f func(Change) error) (ChangesEnd, error) {
	const op = "changes of the disk"
	var end ChangesEnd
	after := ""
	for range maxChangePages {
		m, err := call(ctx, c, op, agentpb.AgentClient.Changes, &agentpb.ChangesRequest{After: []byte(after)})
		if err != nil {
			return end, olderAgent(err)
		}
		list, err := changes(m, after)
		if err != nil {
			return end, fmt.Errorf("guest: %s: %w", op, err)
		}
		if m.Partial != "" {
			end.Partial = shortened(m.Partial, maxErrorText)
		}
		for _, ch := range list {
			if end.Told >= limit {
				end.More = true
				return end, nil
			}
			if err := f(ch); err != nil {
				return end, err
			}
			end.Told++
		}
		if len(m.Until) == 0 {
			return end, nil
		}
		next := string(m.Until)
		if !cleanPath(next) || agentpb.ComparePaths(next, after) <= 0 || len(list) > 0 && agentpb.ComparePaths(next, list[len(list)-1].Path) < 0 {
			return end, fmt.Errorf("guest: %s: %w: it goes on behind %s", op, ErrProtocol, shortened(next, maxErrorText))
		}
		after = next
	}
	return end, fmt.Errorf("guest: %s: %w: more than %d answers", op, ErrProtocol, maxChangePages)
}

// changes checks the guest's answer: a list of paths in order, all after the given one.
func changes(m *agentpb.DiskChanges, after string) ([]Change, error) {
	if len(m.GetChanges()) > agentpb.MaxChanges {
		return nil, fmt.Errorf("%w: %d changes in one message", ErrProtocol, len(m.Changes))
	}
	out := make([]Change, 0, len(m.GetChanges()))
	total := 0
	for _, ch := range m.GetChanges() {
		p, from := string(ch.GetPath()), string(ch.GetFrom())
		total += len(p) + len(from)
		o, ok := changeOps[ch.GetOp()]
		switch {
		case !ok:
			return nil, fmt.Errorf("%w: a change of the kind %d", ErrProtocol, ch.GetOp())
		case !cleanPath(p), from != "" && !cleanPath(from):
			return nil, fmt.Errorf("%w: %s is not a path", ErrProtocol, shortened(p, maxErrorText))
		case agentpb.ComparePaths(p, after) <= 0:
			return nil, fmt.Errorf("%w: %s is told behind %s", ErrProtocol, shortened(p, maxErrorText), shortened(after, maxErrorText))
		case total > agentpb.MaxChangesBytes:
			return nil, fmt.Errorf("%w: more than %d bytes of paths in one message", ErrProtocol, agentpb.MaxChangesBytes)
		}
		after = p
		out = append(out, Change{
			Op: o, Path: p, From: from, Mode: fileMode(ch.GetMode()), Before: fileMode(ch.GetBefore()),
			UID: ch.GetUid(), GID: ch.GetGid(), Size: max(ch.GetSize(), 0),
		})
	}
	return out, nil
}

var changeOps = map[uint32]ChangeOp{
	agentpb.ChangeAdded: PathAdded, agentpb.ChangeChanged: PathChanged, agentpb.ChangeRemoved: PathRemoved,
}

// cleanPath reports whether p is the absolute path of a file, in its shortest form.
func cleanPath(p string) bool {
	return len(p) > 1 && len(p) <= agentpb.MaxPath+1 && p[0] == '/' && path.Clean(p) == p && strings.IndexByte(p, 0) < 0
}

// recordOfChanges turns the guest's report on a command's changes into its form in the audit trail. A nil message
// from a guest that was asked means that it did not report.
func recordOfChanges(m *agentpb.DiskChanges) *audit.Changes {
	if m == nil {
		return &audit.Changes{Partial: "the guest did not say: the command was not started, or its agent is older than that"}
	}
	list, err := changes(m, "")
	if err != nil {
		return &audit.Changes{Partial: err.Error()}
	}
	out := &audit.Changes{More: m.More, Partial: shortened(m.Partial, maxErrorText)}
	for _, ch := range list {
		p := audit.PathText(ch.Path)
		switch ch.Op {
		case PathAdded:
			out.Added = append(out.Added, p)
		case PathChanged:
			out.Changed = append(out.Changed, p)
		case PathRemoved:
			out.Removed = append(out.Removed, p)
		}
	}
	return out
}
