package agent

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agent/proc"
	"github.com/drowse-vm/drowse/guest/agent/upper"
	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/internal/wait"
)

// Limits of finding what has changed on the disk.
const (
	// recordEntries and recordTime bound each of the two walks of a command's record. An entry takes some 200
	// bytes until the command has ended, and one or two system calls.
	recordEntries = 50_000
	recordTime    = 10 * time.Second
	// compareTime bounds the comparison of the two walks.
	compareTime = 20 * time.Second
	// maxRecords bounds the commands that are recorded at the same time.
	maxRecords = 4
	// pageEntries and pageTime bound the walk for one answer to Changes.
	pageEntries = 4096
	pageTime    = 3 * time.Second
)

// diskRecord is the state of the disk when a command began.
type diskRecord struct {
	s      *Server
	before *upper.View
}

// recordDisk looks at the disk before a command begins. The caller closes the record.
func (s *Server) recordDisk(ctx context.Context, m *agentpb.ExecStart) (*diskRecord, error) {
	if err := proc.CheckStart(m); err != nil {
		return nil, err
	}
	if s.records.Add(1) > maxRecords {
		s.records.Add(-1)
		return nil, status.Errorf(codes.ResourceExhausted, "the changes of %d commands are being recorded, the limit", maxRecords)
	}
	r := &diskRecord{s: s}
	t, err := s.cfg.Disk()
	if err == nil {
		defer t.Close()
		r.before, err = t.Look(ctx, "", upper.Budget{Entries: recordEntries, Time: recordTime})
	}
	if err == nil {
		// The wait gives the command's changes later times than those recorded.
		if wait.For(ctx, 2*upper.Tick()) != nil {
			err = ctx.Err()
		}
	}
	if err != nil {
		r.close()
		return nil, fmt.Errorf("record changes of the disk: %w", err)
	}
	return r, nil
}

func (r *diskRecord) close() { r.s.records.Add(-1) }

// since returns what has changed since the record, and in Partial what it could not find out.
func (r *diskRecord) since(ctx context.Context) *agentpb.DiskChanges {
	ctx, cancel := context.WithTimeout(ctx, recordTime+compareTime)
	defer cancel()
	d, err := r.compare(ctx)
	if err != nil {
		return &agentpb.DiskChanges{Partial: agentpb.Cut(proc.Problem(err), agentpb.MaxServiceText)}
	}
	out, left := changesMessage(d)
	out.More = uint64(d.More + left)
	if d.Until != "" {
		out.Partial = fmt.Sprintf("more was written to the disk since its image than is looked at for this (%d files, %v): nothing is known of paths behind %q", recordEntries, recordTime, agentpb.Cut("/"+d.Until, agentpb.MaxServiceText))
	}
	return out
}

func (r *diskRecord) compare(ctx context.Context) (upper.Difference, error) {
	t, err := r.s.cfg.Disk()
	if err != nil {
		return upper.Difference{}, err
	}
	defer t.Close()
	now, err := t.Look(ctx, "", upper.Budget{Entries: recordEntries, Time: recordTime, Until: r.before.Last()})
	if err != nil {
		return upper.Difference{}, err
	}
	d, err := t.Compare(ctx, r.before, now, "", agentpb.MaxChanges)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("it took more than %v to compare: %w", recordTime+compareTime, err)
	}
	return d, err
}

// changesMessage returns the message for a difference, and how many changes did not fit into it.
func changesMessage(d upper.Difference) (m *agentpb.DiskChanges, left int) {
	m = &agentpb.DiskChanges{Changes: d.Changes, Partial: d.Partial}
	total := 0
	for i, c := range d.Changes {
		if total += len(c.Path) + len(c.From); total > agentpb.MaxChangesBytes {
			m.Changes = d.Changes[:i]
			return m, len(d.Changes) - i
		}
	}
	return m, 0
}

// Changes implements agentpb.AgentService. Each call is independent, so a sleep between two calls does no harm.
func (s *Server) Changes(ctx context.Context, m *agentpb.ChangesRequest) (*agentpb.DiskChanges, error) {
	after := strings.TrimPrefix(string(m.After), "/")
	if len(m.After) > agentpb.MaxPath+1 || after != "" && "/"+path.Clean(after) != string(m.After) {
		return nil, status.Errorf(codes.InvalidArgument, "%.100q is not a path to go on behind", m.After)
	}
	t, err := s.cfg.Disk()
	if err != nil {
		return nil, err
	}
	defer t.Close()
	now, err := t.Look(ctx, after, upper.Budget{Entries: pageEntries, Time: pageTime})
	if err != nil {
		return nil, err
	}
	d, err := t.Compare(ctx, upper.Untouched(), now, after, agentpb.MaxChanges)
	if err != nil {
		return nil, err
	}
	out, left := changesMessage(d)
	switch {
	case d.More+left > 0:
		out.Until = out.Changes[len(out.Changes)-1].Path
	case d.Until != "":
		out.Until = []byte("/" + d.Until)
	}
	return out, nil
}
