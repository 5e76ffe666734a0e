//go:build linux

package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/limits"
)

func (a *app) limitsCommand() *cobra.Command {
	var l limits.Limits
	var o limits.Owner
	var each limits.Sandbox
	var owner, class string
	var unset bool
	cmd := &cobra.Command{
		Use: "limits", Short: "Show or set how much of the host all awake sandboxes, those of each owner, and each one may use", Args: cobra.NoArgs,
		Long: `Show how much of the host all awake sandboxes together may use, or set it with flags. A start
that finds no room waits, and fails if none becomes free in time.

--sandboxes, --awake, --awake-mib, --disk-mib and --egress-mib limit the sandboxes of --owner, else
those of each owner without limits of its own. An owner with limits of its own has only those. 0 is
no limit. --owner "" means sandboxes without an owner. With --owner, the command shows what that
owner uses.

--disk-quota, --cpus, --cpu-weight, --io-mib, --io-ops and --io-weight limit each sandbox of
--class, else of each class without limits of its own. They hold from its next start on.`,
		Example: "  drowse limits --sandboxes 20 --awake 5\n  drowse limits --owner alice --awake-mib 16384 --disk-mib 100000\n  drowse limits --class ephemeral --disk-quota 4096 --cpus 2",
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			now, err := limits.Read(s.State.Dir())
			if err != nil {
				return err
			}
			named := cmd.Flags().Changed("owner")
			ofClass := cmd.Flags().Changed("class")
			if unset && named == ofClass {
				return usageError{errors.New("--unset removes the limits of one owner or class: name it with --owner or --class")}
			}
			set, setOwn, setEach := unset, false, false
			one := now.DefaultSandbox
			if ofClass {
				one = now.OfClass(lifetime.Class(class))
			}
			own := now.DefaultOwner
			if named {
				own = now.Owners[owner]
			}
			for flag, take := range map[string]func(){
				"memory-overcommit": func() { now.MemoryOvercommit = l.MemoryOvercommit },
				"wake-reserve":      func() { now.WakeReservePercent = l.WakeReservePercent },
				"memory-wait":       func() { now.MemoryWaitSeconds = l.MemoryWaitSeconds },
				"sandboxes":         func() { own.Sandboxes, setOwn = o.Sandboxes, true },
				"awake":             func() { own.Awake, setOwn = o.Awake, true },
				"awake-mib":         func() { own.AwakeMiB, setOwn = o.AwakeMiB, true },
				"disk-mib":          func() { own.DiskMiB, setOwn = o.DiskMiB, true },
				"egress-mib":        func() { own.EgressMiBPerDay, setOwn = o.EgressMiBPerDay, true },
				"disk-quota":        func() { one.DiskMiB, setEach = each.DiskMiB, true },
				"cpus":              func() { one.CPUs, setEach = each.CPUs, true },
				"cpu-weight":        func() { one.CPUWeight, setEach = each.CPUWeight, true },
				"io-mib":            func() { one.IOMiBPerSecond, setEach = each.IOMiBPerSecond, true },
				"io-ops":            func() { one.IOPerSecond, setEach = each.IOPerSecond, true },
				"io-weight":         func() { one.IOWeight, setEach = each.IOWeight, true },
			} {
				if cmd.Flags().Changed(flag) {
					set = true
					take()
				}
			}
			switch {
			case unset:
				if named {
					delete(now.Owners, owner)
				} else {
					delete(now.Classes, lifetime.Class(class))
				}
			case !named:
				now.DefaultOwner = own
			case setOwn:
				if now.Owners == nil {
					now.Owners = map[string]limits.Owner{}
				}
				now.Owners[owner] = own
			}
			switch {
			case !setEach:
			case !ofClass:
				now.DefaultSandbox = one
			default:
				if now.Classes == nil {
					now.Classes = map[lifetime.Class]limits.Sandbox{}
				}
				now.Classes[lifetime.Class(class)] = one
			}
			if set {
				if err := now.Write(s.State.Dir()); errors.Is(err, limits.ErrLimits) {
					return usageError{err}
				} else if err != nil {
					return err
				}
			}
			said := struct {
				limits.Limits
				Awake    int64            `json:"awake_mib"`
				Capacity int64            `json:"capacity_mib"`
				Use      *limits.OwnerUse `json:"owner_use,omitempty"`
			}{Limits: now}
			if said.Awake, said.Capacity, err = limits.AwakeMemory(s.State.Dir()); err != nil {
				return err
			}
			if named {
				use, err := s.State.OwnerUse(cmd.Context(), owner)
				if err != nil {
					return err
				}
				said.Use = &use
			}
			return a.print(said, func(w io.Writer) {
				fmt.Fprintf(w, "memory overcommit  %g\nwake reserve       %d%%\nmemory wait        %d s\nawake              %d of %d MiB\n",
					now.MemoryOvercommit, now.WakeReservePercent, now.MemoryWaitSeconds, said.Awake, said.Capacity)
				if named {
					may, use := now.Of(owner), said.Use
					fmt.Fprintf(w, "owner              %q\nits sandboxes      %s\nits awake          %s\nits awake RAM      %s MiB\nits disk           %s MiB\nit has sent today  %s MiB\n",
						owner, ofLimit(use.Sandboxes, may.Sandboxes), ofLimit(use.Awake, may.Awake), ofLimit(use.AwakeMiB, may.AwakeMiB), ofLimit(use.DiskMiB, may.DiskMiB), ofLimit(use.EgressMiB, may.EgressMiBPerDay))
					return
				}
				if now.DefaultOwner != (limits.Owner{}) {
					fmt.Fprintf(w, "each owner         %s\n", now.DefaultOwner)
				}
				for _, name := range slices.Sorted(maps.Keys(now.Owners)) {
					fmt.Fprintf(w, "owner %-12q %s\n", name, now.Owners[name])
				}
				if now.DefaultSandbox != (limits.Sandbox{}) {
					fmt.Fprintf(w, "each sandbox       %s\n", now.DefaultSandbox)
				}
				for _, class := range slices.Sorted(maps.Keys(now.Classes)) {
					fmt.Fprintf(w, "each %-13s %s\n", class, now.Classes[class])
				}
			})
		},
	}
	d, f := limits.Default, cmd.Flags()
	f.Float64Var(&l.MemoryOvercommit, "memory-overcommit", d.MemoryOvercommit, "most RAM of all awake sandboxes together, as a multiple of the host's memory")
	f.IntVar(&l.WakeReservePercent, "wake-reserve", d.WakeReservePercent, "percent of that RAM which only wakes may use")
	f.IntVar(&l.MemoryWaitSeconds, "memory-wait", d.MemoryWaitSeconds, "seconds that a start waits for free memory, or for its owner's limits")
	f.StringVar(&owner, "owner", "", "show and set the limits of this owner")
	f.BoolVar(&unset, "unset", false, "remove the limits of --owner or --class: the common ones hold again")
	f.StringVar(&class, "class", "", "set the limits of each sandbox of this class: ephemeral, resumable, workspace")
	f.Var((*mebibytes)(&each.DiskMiB), "disk-quota", "most that a sandbox may make the host store, such as 20g; a number alone is MiB")
	f.Float64Var(&each.CPUs, "cpus", 0, "how many processors a sandbox may use")
	f.IntVar(&each.CPUWeight, "cpu-weight", 0, "a sandbox's share of busy processors, 1 to 10000 (usually 100)")
	f.IntVar(&each.IOMiBPerSecond, "io-mib", 0, "MiB a second that a sandbox may read from the state directory's disk, and as many that it may write")
	f.IntVar(&each.IOPerSecond, "io-ops", 0, "reads a second of a sandbox, and as many writes")
	f.IntVar(&each.IOWeight, "io-weight", 0, "a sandbox's share of a busy disk, 1 to 1000 (usually 100)")
	f.IntVar(&o.Sandboxes, "sandboxes", 0, "how many sandboxes an owner may have")
	f.IntVar(&o.Awake, "awake", 0, "how many sandboxes of an owner may be awake")
	f.IntVar(&o.AwakeMiB, "awake-mib", 0, "RAM of an owner's awake sandboxes together, in MiB")
	f.IntVar(&o.DiskMiB, "disk-mib", 0, "disk that layers and snapshots of an owner may take, in MiB")
	f.IntVar(&o.EgressMiBPerDay, "egress-mib", 0, "what an owner's sandboxes may send to the network in a day (UTC), in MiB")
	return cmd
}

// ofLimit returns a use and its limit, if there is one.
func ofLimit(use, limit int) string {
	if limit == 0 {
		return fmt.Sprint(use)
	}
	return fmt.Sprintf("%d of %d", use, limit)
}
