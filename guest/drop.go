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

// ErrNoDrop says that the guest's agent is too old for Drop.
var ErrNoDrop = errors.New("the agent in the guest is too old to drop files: boot the VM anew with this agent")

// DropPath is a directory of the guest to empty: an absolute, clean path other than the root.
type DropPath struct {
	Path string
	// Seen, if not nil, is Look's result for the path. Drop then removes only what a copy made since then has whole.
	// It keeps whatever has changed since, devices, pipes, sockets, and links that may lead out of the tree.
	Seen *Seen
}

// DropState says what a path is.
type DropState string

// Values of DropState. Drop removes entries only from a DropDirectory.
const (
	DropAbsent    DropState = agentpb.DropAbsent
	DropEmpty     DropState = agentpb.DropEmpty // a directory with nothing in it; only from Look
	DropDirectory DropState = agentpb.DropDirectory
	DropFile      DropState = agentpb.DropFile
	DropOther     DropState = agentpb.DropOther
	DropLink      DropState = agentpb.DropLink     // it, or a directory above it, is a symbolic link
	DropReplaced  DropState = agentpb.DropReplaced // not the directory that Look found
)

// Seen is what a path was when Look ran, as the guest reports it.
type Seen struct {
	State         DropState
	at            int64
	device, inode uint64
}

// Dropped is what Drop did to a path, as the guest reports it.
type Dropped struct {
	State DropState
	// Entries counts the files, links and directories that were removed. Bytes is the space on the guest's disk that
	// they alone used: entries that have further names do not count.
	Entries, Bytes uint64
	// Kept counts entries that DropPath.Seen made Drop keep, and Mounts those that something is mounted on.
	Kept, Mounts uint64
	// Problem says, in printable text, why some entries could not be removed; empty if all could.
	Problem string
}

const opDrop = "drop files"

// dropSlack is how long after its time limit the agent may still answer.
const dropSlack = 30 * time.Second

// Look finds out what paths are and notes the time, for DropPath.Seen. It changes nothing.
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

// Drop empties directories of the guest, which themselves stay, and returns the result for each. It follows no
// symbolic links, not even above a path, and skips what is mounted below. Open or mapped files live on without a
// name. An entry that could not be removed is not an error of Drop. limit is the time for all paths, at most
// MaxDropTime. With trim the guest then writes out dirty data and trims unused blocks on its disk; if that fails,
// Drop returns the results together with the error. The audit trail records a recursive removal of each path.
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

// drop makes the call, and checks that the answer is about the paths that were asked for.
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

// dropState returns the state that a guest names, or DropOther for an unknown word.
func dropState(s string) DropState {
	switch d := DropState(s); d {
	case DropAbsent, DropEmpty, DropDirectory, DropFile, DropLink, DropReplaced:
		return d
	}
	return DropOther
}
