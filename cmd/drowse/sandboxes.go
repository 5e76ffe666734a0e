package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// metadataFlags say who owns a sandbox, what it is for, and how long it lasts.
type metadataFlags struct {
	class, owner, purpose, keep, ttl string
	tags                             []string
	persist                          persistFlags
}

func (l *metadataFlags) add(cmd *cobra.Command, ttl string) {
	f := cmd.Flags()
	f.StringVar(&l.class, "class", "", "what happens at its end: ephemeral, resumable or workspace (the default of a new VM)")
	f.StringVar(&l.owner, "owner", "", "owner, to find it by")
	f.StringVar(&l.purpose, "purpose", "", "description")
	f.StringVar(&l.ttl, "ttl", "", ttl)
	l.persist.add(cmd)
	f.StringVar(&l.keep, "keep", "", "which sleeps to keep, and how long to keep the sandbox after it has expired: last=N,for=TIME,expired=TIME")
}

// given reports whether any of the flags was given.
func (l *metadataFlags) given(cmd *cobra.Command) bool {
	return changed(cmd, "class", "owner", "purpose", "ttl", "keep") || l.persist.given(cmd)
}

// label makes metadata from the flags, without the settings of persistFlags.
func (l *metadataFlags) label(now time.Time) (spec.Metadata, error) {
	out := spec.Metadata{Class: lifetime.Class(l.class), Owner: l.owner, Purpose: l.purpose, Tags: l.tags}
	var err error
	if out.Keep, err = lifetime.ParseKeep(l.keep); err != nil {
		return out, usageError{err}
	}
	if l.ttl != "" {
		if out.Expires, err = expiry(l.ttl, now); err != nil {
			return out, err
		}
	}
	if err := out.Check(); err != nil {
		return out, usageError{err}
	}
	return out, nil
}

// expiry returns when a time to live ends.
func expiry(ttl string, now time.Time) (time.Time, error) {
	d, err := lifetime.ParseDuration(ttl)
	if err != nil {
		return time.Time{}, usageError{err}
	}
	if d == 0 {
		return time.Time{}, usageError{errors.New("--ttl 0: use a time of at least a second; what has none never expires")}
	}
	// Round up to whole seconds, so that a time to live does not end early.
	return now.Add(d + time.Second - 1).Truncate(time.Second), nil
}

// historyDoc is `drowse history -o json`.
type historyDoc struct {
	Version int `json:"version"`
	records.History
}

func (a *app) historyCommand() *cobra.Command {
	var (
		span   records.Span
		before string
	)
	cmd := &cobra.Command{
		Use: "history NAME", Short: "Show the history of a sandbox: its commands and sleeps", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		Long: `Show the history of a sandbox, the newest first: commands with times, exit status, processor time
and bytes, and sleeps with their costs. A removed sandbox has a history for 30 days, by its name
or id.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if before != "" {
				at, err := time.Parse(time.RFC3339Nano, before)
				if err != nil {
					return usageError{fmt.Errorf("--before %q: use a time as 2026-11-22T13:25:42Z", before)}
				}
				span.Before = at
			}
			if span.Limit < 1 || span.Limit > records.MaxPage {
				return usageError{fmt.Errorf("--limit %d: use 1 to %d", span.Limit, records.MaxPage)}
			}
			p, err := a.place()
			if err != nil {
				return err
			}
			h, err := p.History(cmd.Context(), args[0], span)
			if err != nil {
				return err
			}
			for _, p := range h.Problems {
				a.log.Warn("the history may lack something", "cause", printable(p))
			}
			return a.print(historyDoc{1, h}, func(w io.Writer) { printHistory(w, h) })
		},
	}
	cmd.Flags().IntVar(&span.Limit, "limit", records.DefaultPage, "at most this many commands and this many sleeps")
	cmd.Flags().StringVar(&before, "before", "", "only what happened before this time")
	return cmd
}

func printHistory(w io.Writer, h records.History) {
	s := h.Sandbox
	line := fmt.Sprintf("%s %s, %s", s.Name, s.ID, s.Status)
	if !s.Removed.IsZero() {
		line = fmt.Sprintf("%s %s, removed at %s", s.Name, s.ID, s.Removed.Local().Format(daySecond))
	}
	fmt.Fprintln(w, line)
	tableIfAny(w, "\nBEGUN\tTOOK\tRESULT\tCPU\tIN\tOUT\tUSER\tCOMMAND", h.Runs, func(r records.Run) []any {
		took, result := "-", r.State
		if !r.Ended.IsZero() {
			took = r.Ended.Sub(r.Begun).Round(time.Millisecond).String()
		}
		switch {
		case r.Signal != 0:
			result = fmt.Sprintf("signal %d", r.Signal)
		case r.Exit != nil:
			result = fmt.Sprintf("exit %d", *r.Exit)
		case r.Error != "":
			result = "failed"
		}
		return []any{
			r.Begun.Local().Format(daySecond), took, result, fmt.Sprintf("%.3fs", r.CPUSeconds),
			bytesText(r.In), bytesText(r.Out), dash(printable(r.User)), printable(strings.Join(r.Command, " ")),
		}
	})
	tableIfAny(w, "\nASLEEP\tAWAKE SINCE\tCPU\tNET IN\tNET OUT\tSTORED\tSNAPSHOT", h.Sleeps, func(s records.Sleep) []any {
		return []any{
			s.Asleep.Local().Format(daySecond), s.Awake.Local().Format(daySecond), fmt.Sprintf("%.3fs", s.CPUSeconds),
			bytesText(int64(s.NetworkIn)), bytesText(int64(s.NetworkOut)), bytesText(s.Stored), s.Snapshot,
		}
	})
}

func (a *app) renameCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rename NAME NEWNAME", Short: "Rename a sandbox that does not run", Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			row, err := p.Rename(cmd.Context(), args[0], args[1])
			return a.answer(row, err, func(w io.Writer) { fmt.Fprintln(w, row.Name) })
		}),
	}
}

func (a *app) updateCommand() *cobra.Command {
	var (
		l             metadataFlags
		idle          spec.Idle
		vcpus, memory int
		policy, hooks string
		never, reset  bool
		untag         bool
		rotate        rotateFlags
	)
	cmd := &cobra.Command{
		Use: "update NAME", Short: "Change a sandbox: owner, lifetime, policy, size and more", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		Long: `Change a sandbox. Owner, purpose, class, tags, expiry, retention, persistence and network policy
take effect at once, whether it runs or not. Hooks and idle time can be changed while it does
not run, and take effect at its next wake; CPUs and memory while it is stopped, for its next boot.

With --rotate-to each wake begins anew from that snapshot of the sandbox, with its memory and
disk, and leaves what was done since. With --rotate-every or --rotate-at only the first wake
after each such time does.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			set := cmd.Flags().Changed
			want, err := l.label(time.Now())
			if err != nil {
				return err
			}
			c := records.Changes{Reset: reset}
			if c.Rotate, err = rotate.rotation(time.Now()); err != nil {
				return usageError{err}
			}
			c.Class = ifSet(set("class"), &want.Class)
			c.Owner = ifSet(set("owner"), &want.Owner)
			c.Purpose = ifSet(set("purpose"), &want.Purpose)
			c.Tags = ifSet(set("tag") || untag, &want.Tags)
			c.Expires = ifSet(set("ttl") || never, &want.Expires)
			c.Keep = ifSet(set("keep"), &want.Keep)
			if l.persist.given(cmd) {
				before, err := a.persistOf(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				is, err := l.persist.over(cmd, before)
				if err != nil {
					return err
				}
				c.Persist = &is
			}
			if c.Spec.Policy, err = policyFrom(policy); err != nil {
				return err
			}
			p, err := a.place()
			if err != nil {
				return err
			}
			if set("sleep-after") || set("idle-cpu") || set("hooks") {
				wasIdle, wasHooks, err := p.idle(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				if set("sleep-after") || set("idle-cpu") {
					is := wasIdle
					if set("sleep-after") {
						is.SleepSeconds = idle.SleepSeconds
					}
					if set("idle-cpu") {
						is.CPUPercent = idle.CPUPercent
					}
					c.Spec.Idle = &is
				}
				if set("hooks") {
					is := wasHooks
					is.Policy = spec.HookPolicy(hooks)
					c.Spec.Hooks = &is
				}
			}
			c.Spec.VCPUs = ifSet(set("vcpus"), &vcpus)
			c.Spec.MemoryMiB = ifSet(set("memory"), &memory)
			s, err := p.Update(cmd.Context(), args[0], c)
			return a.answer(s, err, func(w io.Writer) { fmt.Fprintln(w, s.Name) })
		},
	}
	l.add(cmd, "let it expire after this time from now on, as 12h or 7d")
	f := cmd.Flags()
	f.StringArrayVar(&l.tags, "tag", nil, "replace its tags, except those of its network policy; repeatable")
	f.BoolVar(&untag, "no-tags", false, "remove its tags, except those of its network policy")
	f.BoolVar(&l.persist.all, flagPersistAll, false, "let everything persist: drop and promote nothing, without a limit")
	f.BoolVar(&never, "no-expiry", false, "let the sandbox never expire")
	f.BoolVar(&reset, "reset", false, "first clear class, owner, purpose, tags, expiry and retention, even if they cannot be read")
	f.IntVar(&vcpus, "vcpus", 0, "number of CPUs, 1 to 8")
	f.VarP((*mebibytes)(&memory), "memory", "m", "RAM, 64m to 16g; a number alone is MiB")
	f.StringVar(&hooks, "hooks", "", "hooks in the guest, and on the host before a sleep: require, ignore or skip")
	policyFlag(cmd, &policy, "as it is")
	idleFlags(cmd, &idle, "as it is")
	rotate.add(cmd)
	cmd.MarkFlagsMutuallyExclusive("ttl", "no-expiry")
	cmd.MarkFlagsMutuallyExclusive("tag", "no-tags")
	return cmd
}

func (a *app) pruneCommand() *cobra.Command {
	var dry bool
	cmd := &cobra.Command{
		Use: "prune", Short: "Remove expired sandboxes, and delete sleeps, disk layers and cached pages that nothing needs", Args: cobra.NoArgs,
		Long: `Put expired sandboxes to sleep or remove them, as their class says (see "drowse run --class"), and
delete sleeps, disk layers and cached pages that nothing needs. Snapshots of "drowse snapshot"
and those with tags stay. "drowse serve" looks for expired sandboxes every minute, and for the rest
every hour.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			at, err := a.place()
			if err != nil {
				return err
			}
			p, err := at.Prune(cmd.Context(), dry)
			if err != nil {
				return err
			}
			for _, problem := range p.Problems {
				a.log.Warn("not all could be done", "cause", printable(problem))
			}
			if err := a.print(p, func(w io.Writer) { printPruned(w, p) }); err != nil {
				return err
			}
			if len(p.Problems) > 0 {
				return statusError(exitFailed)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only report what would be put to sleep, removed and deleted")
	return cmd
}

func printPruned(w io.Writer, p records.Pruned) {
	would := ""
	if p.DryRun {
		would = "would be "
	}
	for _, s := range p.Sleep {
		fmt.Fprintf(w, "%s %sput to sleep: %s\n", s.Name, would, s.Why)
	}
	for _, s := range p.Remove {
		fmt.Fprintf(w, "%s %sremoved: %s\n", s.Name, would, s.Why)
	}
	if p.DryRun {
		for _, s := range p.Plan.Snapshots {
			fmt.Fprintf(w, "snapshot %s would be deleted: %s\n", s.ID, s.Why)
		}
		for _, s := range p.Abandoned {
			fmt.Fprintf(w, "snapshot %s would be deleted, a disk that %s has left: %s\n", s.ID, s.Name, s.Why)
		}
		fmt.Fprintf(w, "%d snapshots, %s, and what only removed sandboxes need\n", p.Freed.Snapshots, bytesText(p.Bytes))
		return
	}
	fmt.Fprintf(w, "%d snapshots, %d layers and %d files of cached pages, %s\n",
		p.Freed.Snapshots, p.Layers, p.CacheFiles, bytesText(p.Bytes))
}

func (a *app) snapshotTagCommand() *cobra.Command {
	return &cobra.Command{
		Use: "tag ID [TAG...]", Short: "Set the tags of a snapshot; nothing prunes one with tags", Args: cobra.MinimumNArgs(1),
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			info, err := p.TagSnapshot(cmd.Context(), args[0], args[1:])
			return a.answer(info, err, func(w io.Writer) { fmt.Fprintln(w, info.ID, strings.Join(info.Tags, " ")) })
		}),
	}
}
