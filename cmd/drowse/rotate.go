package main

import (
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// rotateFlags say at which wakes a sandbox starts over.
type rotateFlags struct {
	to, at, every string
	never         bool
}

func (r *rotateFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&r.to, "rotate-to", "", "begin anew from this `snapshot` of the sandbox at each wake, or as often as --rotate-at and --rotate-every say")
	f.StringVar(&r.every, "rotate-every", "", "only at the first wake in each period of this `time`, such as 24h; the first period begins at --rotate-at, or now")
	f.StringVar(&r.at, "rotate-at", "", "only at the first wake after this `time`, such as 2026-11-23T06:00:00Z")
	f.BoolVar(&r.never, "no-rotate", false, "continue from the last sleep at each wake again")
}

// rotation returns the rotation that the flags describe, or nil for no change.
func (r *rotateFlags) rotation(now time.Time) (*spec.Rotation, error) {
	timed := r.at != "" || r.every != ""
	switch {
	case r.never && (r.to != "" || timed):
		return nil, errors.New("--no-rotate does not go with --rotate-to, --rotate-every and --rotate-at")
	case r.never:
		return &spec.Rotation{}, nil
	case r.to == "" && timed:
		return nil, errors.New("--rotate-every and --rotate-at go with --rotate-to, the snapshot to begin anew from")
	case r.to == "":
		return nil, nil //nolint:nilnil // no change is no error
	case !timed:
		return &spec.Rotation{To: r.to}, nil
	}
	t, err := timerOf(now, "--rotate-", r.at, "", r.every)
	return &spec.Rotation{To: r.to, At: t.At, Every: t.Every}, err
}
