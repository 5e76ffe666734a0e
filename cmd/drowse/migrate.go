package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// moversAtOnce is how many VMs of a host that is evacuated move at once.
const moversAtOnce = 3

func (a *app) migrateCommand() *cobra.Command {
	var (
		all   bool
		to    string
		hooks string
	)
	cmd := &cobra.Command{
		Use: "migrate NAME... --to HOST | --all --to HOST", Short: "Move VMs to another host of the cluster", ValidArgsFunction: a.completeVM,
		Long: `Move VMs to another host of the cluster ("drowse serve --cluster", with --cluster-address on both).
What that host needs goes there while the VM runs. Then it sleeps, the rest follows, and it wakes
there. If a move fails, the VM goes on where it is. A VM that sleeps is published, and any host can
wake it.

VMs with shares, volumes or rotation, templates, ephemeral, stopped and crashed ones cannot move.
With --all, that is said of each, and the others move, three at a time.`,
		Args: func(_ *cobra.Command, args []string) error { return namesOrAll(all, args) },
		RunE: func(cmd *cobra.Command, args []string) error {
			if to == "" {
				return usageError{errors.New("--to names the host where they are to go")}
			}
			p, err := a.place()
			if err != nil {
				return err
			}
			o := spec.MigrateOptions{To: to, Hooks: spec.HookPolicy(hooks)}
			if all {
				return a.evacuate(cmd.Context(), p, o)
			}
			return each(a, args, "moved", func(name string) (spec.MigrateResult, error) {
				res, err := p.Migrate(cmd.Context(), name, o)
				a.warnMoved(res)
				return res, err
			}, printMoved)
		},
	}
	f := cmd.Flags()
	f.StringVar(&to, "to", "", "`HOST` of the cluster, by its --cluster-host")
	f.BoolVar(&all, "all", false, "evacuate this host: all VMs that run or sleep here; says which stay, and why")
	hooksFlag(cmd, &hooks)
	return cmd
}

func (a *app) warnMoved(res spec.MigrateResult) {
	if res.Problem != "" {
		a.log.Warn("the VM has moved, and not all could be done after that", "vm", res.Name, "problem", printable(res.Problem))
	}
}

func printMoved(w io.Writer, res spec.MigrateResult) {
	if res.Asleep {
		fmt.Fprintf(w, "%s sleeps in the store of the cluster: any host can wake it\n", res.Name)
		return
	}
	s := res.Stages
	fmt.Fprintf(w, "%s runs on %s: down %.0f ms (pause %.0f, publish %.0f, wake %.0f), %s in it, %s ahead in %.0f ms\n",
		res.Name, res.To, res.Downtime, s["pause"], s["publish"], s["wake"], bytesText(res.BytesPause), bytesText(res.BytesAhead), s["ahead"])
}

// stayed is a VM that did not move.
type stayed struct {
	Name string `json:"name"`
	Why  string `json:"why"`
}

// evacuated is `drowse migrate --all -o json`.
type evacuated struct {
	Moved  []spec.MigrateResult `json:"moved"`
	Stayed []stayed             `json:"stayed"`
}

// evacuate moves all VMs of this host, some at a time.
func (a *app) evacuate(ctx context.Context, p place, o spec.MigrateOptions) error {
	list, err := p.evacuees(ctx)
	if err != nil {
		return err
	}
	out := evacuated{Moved: []spec.MigrateResult{}, Stayed: []stayed{}}
	var mu sync.Mutex // guards out
	var group errgroup.Group
	group.SetLimit(moversAtOnce)
	for _, b := range list.Sandboxes {
		group.Go(func() error {
			res, err := p.Migrate(ctx, b.Name, o)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				out.Stayed = append(out.Stayed, stayed{b.Name, err.Error()})
				return nil
			}
			a.warnMoved(res)
			if out.Moved = append(out.Moved, res); !a.json() {
				printMoved(a.stdout, res)
			}
			return nil
		})
	}
	_ = group.Wait() // it returns none
	slices.SortFunc(out.Stayed, func(a, b stayed) int { return strings.Compare(a.Name, b.Name) })
	errs := []error{}
	if a.json() {
		errs = append(errs, printJSON(a.stdout, out))
	}
	for _, s := range out.Stayed {
		errs = append(errs, fmt.Errorf("%s stays: %s", s.Name, s.Why))
	}
	for _, problem := range list.Problems {
		errs = append(errs, fmt.Errorf("it cannot be read, and stays: %s", problem))
	}
	return errors.Join(errs...)
}
