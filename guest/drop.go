package guest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/audit"
)

// Limits of a drop.
const (
	MaxDropPaths = agentpb.MaxDropPaths
	MaxDropTime  = agentpb.MaxDropTime
)

// ErrNoDrop says that the guest's agent is too old to drop anything.
var ErrNoDrop = errors.New("the agent in the guest is too old to drop files: boot the VM anew with this agent")

// DropPath is a directory of the guest whose contents go: an absolute, clean path, and not the root.
type DropPath struct {
	Path string
	// Seen, if not nil, is what Look has found of the path. Then only goes what a copy made since then has whole: what
	// has changed since, devices, pipes, sockets, and links that may lead out of the tree stay.
	Seen *Seen
}

// DropState is what a path is.
type DropState string

// The states. Nothing is removed but from a DropDirectory.
const (
	DropAbsent    DropState = agentpb.DropAbsent
	DropEmpty     DropState = agentpb.DropEmpty // a directory with nothing in it; only of Look
	DropDirectory DropState = agentpb.DropDirectory
	DropFile      DropState = agentpb.DropFile
	DropOther     DropState = agentpb.DropOther
	DropLink      DropState = agentpb.DropLink     // it, or a directory above it, is a symbolic link
	DropReplaced  DropState = agentpb.DropReplaced // it is another directory than Look has found
)

// Seen is what a path was at some time, as the guest says.
type Seen struct {
	State         DropState
	at            int64
	device, inode uint64
}

// Dropped is what has become of a path, as the guest says.
type Dropped struct {
	State DropState
	// Entries are files, links and directories that were removed, and Bytes what they had on the guest's disk, as far
	// as no other name has them.
	Entries, Bytes uint64
	// Kept are entries that stay for what DropPath.Seen says, and Mounts those on which something is mounted.
	Kept, Mounts uint64
	// Problem is why not all could be removed, printable; empty if all could.
	Problem string
}

const opDrop = "drop files"

// dropSlack is how much longer than its limit the agent may take to answer.
const dropSlack = 30 * time.Second

// Look finds out what paths are, and notes the time: for DropPath.Seen. It changes nothing.
func (c *Client) Look(ctx context.Context, paths []string) ([]Seen, error) {
	m := &agentpb.DropRequest{Look: true, LimitNanos: int64(time.Minute)}
	for _, p := range paths {
		m.Paths = append(m.Paths, &agentpb.DropPath{Path: p})
	}
	r, err := c.drop(ctx, m)
	if err != nil {
		return nil, err
	}
	if r.NowNanos == 0 {
		return nil, fmt.Errorf("guest: %s: %w: no time of a look", opDrop, ErrProtocol)
	}
	var out []Seen
	for i, p := range r.Paths {
		if p.Problem != "" {
			return nil, fmt.Errorf("guest: look at %s: %s", paths[i], shortened(p.Problem, agentpb.MaxDropProblem))
		}
		out = append(out, Seen{State: dropState(p.State), at: r.NowNanos, device: p.Device, inode: p.Inode})
	}
	return out, nil
}

// Drop removes what is in directories of the guest, which stay themselves, and returns what has become of each. It
// follows no symbolic links, also not above a path, and leaves alone what is mounted below. Files that are open, or
// mapped, go on without a name. What could not be removed is no error of Drop. limit is the time for all of it, at most
// MaxDropTime. With trim the guest writes out what is dirty afterwards, and tells its disk what it does not use any
// more; if that fails, what has become of the paths is returned with the error. In the audit trail it is a removal of
// each path with all below it.
func (c *Client) Drop(ctx context.Context, paths []DropPath, limit time.Duration, trim bool) (_ []Dropped, err error) {
	m := &agentpb.DropRequest{LimitNanos: int64(limit), Trim: trim}
	for _, p := range paths {
		noted, rerr := c.record(ctx, opDrop, audit.Action{Kind: audit.KindRemove, Path: p.Path, Recursive: true})
		if rerr != nil {
			return nil, rerr
		}
		defer func() { noted.End(audit.Outcome{Error: text(err)}) }()
		dp := &agentpb.DropPath{Path: p.Path}
		if p.Seen != nil {
			dp.BeforeNanos, dp.Device, dp.Inode = p.Seen.at, p.Seen.device, p.Seen.inode
		}
		m.Paths = append(m.Paths, dp)
	}
	r, err := c.drop(ctx, m)
	if err != nil {
		return nil, err
	}
	var out []Dropped
	for _, p := range r.Paths {
		out = append(out, Dropped{
			State: dropState(p.State), Entries: p.Entries, Bytes: p.Bytes, Kept: p.Kept, Mounts: p.Mounts,
			Problem: shortened(p.Problem, agentpb.MaxDropProblem),
		})
	}
	if r.TrimProblem != "" {
		return out, fmt.Errorf("guest: %s: %s", opDrop, shortened(r.TrimProblem, agentpb.MaxDropProblem))
	}
	return out, nil
}

// drop makes the call, and checks that it is about the paths that were asked for.
func (c *Client) drop(ctx context.Context, m *agentpb.DropRequest) (*agentpb.DropResponse, error) {
	r, err := callWithin(ctx, c, opDrop, time.Duration(m.LimitNanos)+dropSlack, agentpb.AgentClient.Drop, m)
	if unknownCall(err) {
		return nil, fmt.Errorf("guest: %s: %w", opDrop, ErrNoDrop)
	}
	if err != nil {
		return nil, err
	}
	if len(r.Paths) != len(m.Paths) {
		return nil, fmt.Errorf("guest: %s: %w: an answer about %d paths to a question about %d", opDrop, ErrProtocol, len(r.Paths), len(m.Paths))
	}
	return r, nil
}

// dropState is a state that there is; any other word of a guest's is DropOther.
func dropState(s string) DropState {
	switch d := DropState(s); d {
	case DropAbsent, DropEmpty, DropDirectory, DropFile, DropLink, DropReplaced:
		return d
	}
	return DropOther
}
