package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/limits"
)

func (a *app) limitsCommand() *cobra.Command {
	var l limits.Limits
	var o limits.Owner
	var owner string
	var unset bool
	cmd := &cobra.Command{
		Use: "limits", Short: "Show or set how much of the host all awake sandboxes, and those of each owner, may use", Args: cobra.NoArgs,
		Long: `Show how much of the host all awake sandboxes together may use, or set it with flags. A start
that finds no room waits, and fails if none becomes free in time.

--sandboxes, --awake, --awake-mib, --disk-mib and --egress-mib limit the sandboxes of --owner, else
those of each owner without limits of its own; who has some of its own has no others. 0 is no limit.
--owner "" means sandboxes without an owner. With --owner, the command shows what that owner uses.`,
		Example: "  drowse limits --sandboxes 20 --awake 5\n  drowse limits --owner alice --awake-mib 16384 --disk-mib 100000",
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
			if unset && !named {
				return usageError{errors.New("--unset removes the limits of one owner: name it with --owner")}
			}
			set := unset
			own := now.DefaultOwner
			if named {
				own = now.Owners[owner]
			}
			for flag, take := range map[string]func(){
				"memory-overcommit": func() { now.MemoryOvercommit = l.MemoryOvercommit },
				"wake-reserve":      func() { now.WakeReservePercent = l.WakeReservePercent },
				"memory-wait":       func() { now.MemoryWaitSeconds = l.MemoryWaitSeconds },
				"sandboxes":         func() { own.Sandboxes = o.Sandboxes },
				"awake":             func() { own.Awake = o.Awake },
				"awake-mib":         func() { own.AwakeMiB = o.AwakeMiB },
				"disk-mib":          func() { own.DiskMiB = o.DiskMiB },
				"egress-mib":        func() { own.EgressMiBPerDay = o.EgressMiBPerDay },
			} {
				if cmd.Flags().Changed(flag) {
					set = true
					take()
				}
			}
			switch {
			case unset:
				delete(now.Owners, owner)
			case !named:
				now.DefaultOwner = own
			case set:
				if now.Owners == nil {
					now.Owners = map[string]limits.Owner{}
				}
				now.Owners[owner] = own
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
			})
		},
	}
	d, f := limits.Default, cmd.Flags()
	f.Float64Var(&l.MemoryOvercommit, "memory-overcommit", d.MemoryOvercommit, "limit of their RAM together, as a multiple of the host's memory")
	f.IntVar(&l.WakeReservePercent, "wake-reserve", d.WakeReservePercent, "percent of that reserved for wakes")
	f.IntVar(&l.MemoryWaitSeconds, "memory-wait", d.MemoryWaitSeconds, "seconds that a start waits for free memory, or for its owner's limits")
	f.StringVar(&owner, "owner", "", "show and set the limits of this owner")
	f.BoolVar(&unset, "unset", false, "remove the owner's own limits: those of all others hold again")
	f.IntVar(&o.Sandboxes, "sandboxes", 0, "how many sandboxes an owner may have")
	f.IntVar(&o.Awake, "awake", 0, "how many of them may be awake")
	f.IntVar(&o.AwakeMiB, "awake-mib", 0, "how much RAM these may have together, in MiB")
	f.IntVar(&o.DiskMiB, "disk-mib", 0, "how much disk their layers and snapshots may take, in MiB")
	f.IntVar(&o.EgressMiBPerDay, "egress-mib", 0, "how much they may send to the network in a day (UTC), in MiB")
	return cmd
}

// ofLimit returns a use and its limit, if there is one.
func ofLimit(use, limit int) string {
	if limit == 0 {
		return fmt.Sprint(use)
	}
	return fmt.Sprintf("%d of %d", use, limit)
}
