package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// persistFlags say what a sandbox drops or copies out before it sleeps, and how much data it may keep.
type persistFlags struct {
	drop, promote []string
	max           byteSize
	all           bool
}

// Names of the flags.
const (
	flagDrop       = "drop"
	flagPromote    = "promote"
	flagPersistMax = "persist-max"
	flagPersistAll = "persist-all"
)

func (p *persistFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringArrayVar(&p.drop, flagDrop, nil, "directory in the guest to empty before each sleep; repeatable")
	f.StringArrayVar(&p.promote, flagPromote, nil, "PATH=HOSTDIR: copy this file or directory of the guest to HOSTDIR/NAME/TIME before each sleep; repeatable")
	f.Var(&p.max, flagPersistMax, "refuse to sleep with more data than this on the writable disk, such as 512m or 2g; a number alone is bytes, 0 no limit")
}

// given reports whether any of the flags was given.
func (p *persistFlags) given(cmd *cobra.Command) bool {
	return changed(cmd, flagDrop, flagPromote, flagPersistMax, flagPersistAll)
}

// over applies the flags to the earlier settings.
func (p *persistFlags) over(cmd *cobra.Command, before lifetime.Persist) (lifetime.Persist, error) {
	out, set := before.Clone(), cmd.Flags().Changed
	if p.all {
		if changed(cmd, flagDrop, flagPromote, flagPersistMax) {
			return out, usageError{fmt.Errorf("--%s does not go with --%s, --%s and --%s", flagPersistAll, flagDrop, flagPromote, flagPersistMax)}
		}
		return lifetime.Persist{}, nil
	}
	if set(flagDrop) {
		out.Drop = p.drop
	}
	if set(flagPromote) {
		out.Promote = nil
		for _, text := range p.promote {
			m, err := lifetime.ParsePromotion(text)
			if err != nil {
				return out, usageError{err}
			}
			if m.To, err = filepath.Abs(m.To); err != nil {
				return out, fmt.Errorf("--%s %s: %w", flagPromote, text, err)
			}
			out.Promote = append(out.Promote, m)
		}
	}
	if set(flagPersistMax) {
		out.MaxBytes = int64(p.max)
	}
	if err := out.Check(); err != nil {
		return out, usageError{err}
	}
	return out, nil
}

// byteSize is a flag for a number of bytes.
type byteSize int64

func (b *byteSize) String() string {
	if *b == 0 {
		return ""
	}
	return strconv.FormatInt(int64(*b), 10)
}

// Set parses a number with or without a unit.
func (b *byteSize) Set(s string) error {
	n, _, ok := parseSize(s)
	if !ok {
		return fmt.Errorf("%q: use a number of bytes, or one as 512m or 2g", s)
	}
	*b = byteSize(n)
	return nil
}

// Type returns the help's word for the value.
func (*byteSize) Type() string { return "bytes" }

func (a *app) promoteCommand() *cobra.Command {
	return &cobra.Command{
		Use: "promote NAME", Short: "Copy the promoted files of a sandbox to the host now", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		Long: `Copy the files and directories of --promote ("drowse run", "drowse update") to HOSTDIR/NAME/TIME
now, as before each sleep. A copy is complete or absent. Nothing is dropped. The sandbox must
run; a sleeping one was promoted before it fell asleep.`,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			copies, err := p.Promote(cmd.Context(), args[0])
			return a.answer(wire.Promoted{Promoted: some(copies)}, err, func(w io.Writer) { printPromoted(w, copies) })
		}),
	}
}

func printPromoted(w io.Writer, copies []spec.Promoted) {
	for _, c := range copies {
		skipped := ""
		if c.SkippedCount > 0 {
			skipped = fmt.Sprintf(", without %d links out of it", c.SkippedCount)
		}
		fmt.Fprintf(w, "%s promoted to %s (%d files and directories, %s%s)\n", c.Path, c.At, c.Entries, bytesText(c.Bytes), skipped)
	}
}

// printPersisted prints what a sleep did with files that do not persist.
func printPersisted(w io.Writer, p *spec.Persisted) {
	if p == nil {
		return
	}
	printPromoted(w, p.Promoted)
	for _, d := range p.Dropped {
		stays := ""
		if n := d.Kept + d.Mounts; n > 0 {
			stays = fmt.Sprintf("; %d stay", n)
		}
		fmt.Fprintf(w, "%s dropped (%d files and directories, %s%s)\n", d.Path, d.Entries, sizeText(d.Bytes), stays)
	}
}

// warnPersisted logs failures that the sleep ignored.
func (a *app) warnPersisted(vm string, p *spec.Persisted) {
	if p == nil {
		return
	}
	for _, problem := range p.Problems {
		a.log.Warn("not all was promoted or dropped", "vm", vm, "cause", printable(problem))
	}
}

// persistOf returns the settings in a sandbox's metadata. Those of unreadable ones are empty: the command that changes
// them reports the error.
func (a *app) persistOf(ctx context.Context, name string) (lifetime.Persist, error) {
	p, err := a.place()
	if err != nil {
		return lifetime.Persist{}, err
	}
	b, err := p.Get(ctx, name)
	return b.Persist, err
}
