//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/term"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/procstat"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Bounds of a look at running VMs.
const (
	topAtOnce  = 8
	topAskTime = time.Second
	minTop     = 200 * time.Millisecond
)

// topDoc is what drowse top saw in one interval of Ms milliseconds.
type topDoc struct {
	Version   int            `json:"version"`
	Ms        float64        `json:"ms"`
	Counts    map[string]int `json:"counts"` // of all sandboxes, by status
	Sandboxes []topRow       `json:"sandboxes"`
	Problems  []string       `json:"problems,omitempty"`
}

// topRow is a sandbox with a process, and its use in the interval. Unknown values are 0.
type topRow struct {
	Name   string         `json:"name"`
	Status records.Status `json:"status"`
	Owner  string         `json:"owner,omitempty"`
	PID    int            `json:"pid"`
	// CPU is the processor time of its processes in processors: 1 is one fully used processor.
	CPU float64 `json:"cpu"`
	// Memory is the resident memory of its processes in bytes, shared memory included.
	Memory int64 `json:"memory_bytes"`
	// In and Out are the bytes per second that the policy let pass to and from the guest. Denied is the packets
	// per second that it did not let pass.
	In     float64 `json:"network_in_bytes_per_second"`
	Out    float64 `json:"network_out_bytes_per_second"`
	Denied float64 `json:"denied_packets_per_second"`
}

// topUse is the total use of a process up to a moment.
type topUse struct {
	pid             int
	at              time.Time
	cpu             time.Duration
	memory          int64
	in, out, denied uint64
	network         bool // the three above are known
}

func (a *app) topCommand() *cobra.Command {
	var every time.Duration
	var once bool
	cmd := &cobra.Command{
		Use: "top", Short: "Show what running sandboxes use, updated periodically", Args: cobra.NoArgs,
		Long: `Show the number of sandboxes in each status, and what running ones used since the last update:
processor and memory of their processes, and network traffic. Those that use most come first.
drowse looks from the host only, so this keeps no VM awake. With --once or -o json, or if stdout
is no terminal, it measures one interval, prints one table and ends.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < minTop {
				return usageError{fmt.Errorf("--every %v: use %v or more", every, minTop)}
			}
			s, err := a.store()
			if err != nil {
				return err
			}
			out, isFile := raw(a.stdout).(*os.File)
			live := !once && !a.json() && isFile && term.IsTerminal(int(out.Fd()))
			t := topper{fleet: fleet.New(s, fleet.Options{}), use: processUse, now: time.Now, record: s.State.Get, network: func(ctx context.Context, name string) (spec.NetworkStats, error) {
				return s.Sandbox(name).NetworkStats(ctx)
			}}
			err = t.run(cmd.Context(), every, func(d topDoc) error {
				rows := len(d.Sandboxes)
				if live {
					if _, height, err := term.GetSize(int(out.Fd())); err == nil {
						rows = min(rows, max(height-3, 1))
					}
					// Cursor home, then clear to the end of the screen (ECMA-48, CUP and ED).
					fmt.Fprint(out, "\x1b[H\x1b[J")
				}
				if err := a.print(d, func(w io.Writer) { d.write(w, rows) }); err != nil || live {
					return err
				}
				return errTopDone
			})
			if errors.Is(err, errTopDone) || live && cmd.Context().Err() != nil {
				return nil
			}
			return err
		},
	}
	cmd.Flags().DurationVar(&every, "every", 2*time.Second, "update interval")
	cmd.Flags().BoolVar(&once, "once", false, "print one table and end")
	return cmd
}

var errTopDone = errors.New("done")

// topper looks at VMs.
type topper struct {
	fleet   *fleet.Fleet
	record  func(name string) (*state.Record, error)
	network func(ctx context.Context, name string) (spec.NetworkStats, error)
	use     func(pid int) (cpu time.Duration, memory int64, err error)
	now     func() time.Time

	before map[string]topUse // by name
}

// run looks at each interval, and passes each look but the first to do, until ctx ends or do fails.
func (t *topper) run(ctx context.Context, every time.Duration, do func(topDoc) error) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	if _, err := t.look(ctx); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		d, err := t.look(ctx)
		if err == nil {
			err = do(d)
		}
		if err != nil {
			return err
		}
	}
}

// look returns the use since the last look, without sandboxes that the last look did not see.
func (t *topper) look(ctx context.Context) (topDoc, error) {
	d := topDoc{Version: 1, Counts: map[string]int{}, Sandboxes: []topRow{}}
	var live []records.Sandbox
	for after := ""; ; {
		page, err := t.fleet.List(ctx, records.Filter{After: after, Limit: records.MaxPage})
		if err != nil {
			return d, err
		}
		for _, s := range page.Sandboxes {
			d.Counts[string(s.Status)]++
			if s.Status.Live() {
				live = append(live, s)
			}
		}
		d.Problems = append(d.Problems, page.Problems...)
		if after = page.Next; after == "" {
			break
		}
	}
	uses := make(map[string]topUse, len(live))
	var mu sync.Mutex // guards uses
	var group errgroup.Group
	group.SetLimit(topAtOnce)
	for _, s := range live {
		group.Go(func() error {
			if u, ok := t.one(ctx, s); ok { // else the process has ended meanwhile
				mu.Lock()
				defer mu.Unlock()
				uses[s.Name] = u
			}
			return nil
		})
	}
	_ = group.Wait() // there is no error
	if err := ctx.Err(); err != nil {
		return d, err
	}
	for _, s := range live {
		u, ok := uses[s.Name]
		if !ok {
			continue
		}
		row := topRow{Name: s.Name, Status: s.Status, Owner: s.Owner, PID: u.pid, Memory: u.memory}
		if b := t.before[s.Name]; b.pid == u.pid {
			took := u.at.Sub(b.at)
			d.Ms = max(d.Ms, float64(took.Microseconds())/1000)
			rate := func(now, before uint64) float64 {
				if !u.network || !b.network || now < before {
					return 0
				}
				return float64(now-before) / took.Seconds()
			}
			row.CPU = max(0, (u.cpu-b.cpu).Seconds()/took.Seconds())
			row.In, row.Out, row.Denied = rate(u.in, b.in), rate(u.out, b.out), rate(u.denied, b.denied)
		}
		d.Sandboxes = append(d.Sandboxes, row)
	}
	t.before = uses
	slices.SortStableFunc(d.Sandboxes, func(a, b topRow) int {
		return cmp.Or(cmp.Compare(b.CPU, a.CPU), cmp.Compare(b.Memory, a.Memory), strings.Compare(a.Name, b.Name))
	})
	return d, nil
}

// one returns the use of a VM's process, or false if there is none.
func (t *topper) one(ctx context.Context, s records.Sandbox) (u topUse, ok bool) {
	r, err := t.record(s.Name)
	if err != nil || r.PID == 0 {
		return u, false
	}
	u.pid, u.at = r.PID, t.now()
	if u.cpu, u.memory, err = t.use(u.pid); err != nil {
		return u, false
	}
	if s.Status != records.Running || r.Spec.Network != spec.NetworkTAP {
		return u, true
	}
	ctx, cancel := context.WithTimeout(ctx, topAskTime)
	defer cancel()
	st, err := t.network(ctx, s.Name)
	if err != nil {
		return u, true
	}
	u.network = true
	for _, c := range st.Counters {
		switch {
		case c.Verdict != netpolicy.Allow:
			u.denied += c.Packets
		case c.Direction == netpolicy.Ingress:
			u.in += c.Bytes
		default:
			u.out += c.Bytes
		}
	}
	return u, true
}

// processUse reads the use of a VM's processes.
func processUse(pid int) (cpu time.Duration, memory int64, err error) {
	u, err := procstat.Of(pid)
	return u.User + u.System, u.Resident, err
}

// write prints the first rows of a topDoc.
func (d topDoc) write(w io.Writer, rows int) {
	var parts []string
	for _, s := range records.Statuses {
		if n := d.Counts[string(s)]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, s))
		}
	}
	if len(parts) == 0 {
		parts = []string{"no sandboxes"}
	}
	fmt.Fprintln(w, strings.Join(parts, ", "))
	if len(d.Sandboxes) == 0 {
		return
	}
	t := columns(w)
	fmt.Fprintln(t, "NAME\tSTATUS\tCPU\tMEMORY\tIN/s\tOUT/s\tDENIED/s\tOWNER")
	for _, r := range d.Sandboxes[:rows] {
		fmt.Fprintf(t, "%s\t%s\t%.1f%%\t%s\t%s\t%s\t%.1f\t%s\n", r.Name, r.Status, 100*r.CPU, bytesText(r.Memory), bytesText(int64(r.In)), bytesText(int64(r.Out)),
			r.Denied, dash(printable(r.Owner)))
	}
	t.Flush()
}
