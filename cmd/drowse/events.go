package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// eventOptions say which events to print.
type eventOptions struct {
	since  string // a cursor, "now", or "" for all
	follow bool
	filter events.Filter
}

func (a *app) eventsCommand() *cobra.Command {
	var (
		since string
		o     eventOptions
	)
	cmd := &cobra.Command{
		Use: "events", Short: "Show the events of sandboxes: created, woken, put to sleep, removed and more", Args: cobra.NoArgs,
		Long: `Show the events of sandboxes, the oldest first: created, woken, put to sleep, forked, removed and
so on, each with its cause. --follow continues until it is interrupted. With -o json each event
is one line; --since takes its "cursor". drowse keeps 16 MiB and 30 days of events at most.`,
		RunE: a.there(func(cmd *cobra.Command, _ []string, p place) error {
			var from time.Time
			if d, derr := lifetime.ParseDuration(since); derr == nil && since != "" && strings.ContainsAny(since, "smhd") {
				from = time.Now().Add(-d)
			} else if t, terr := time.Parse(time.RFC3339Nano, since); terr == nil {
				from = t
			} else {
				o.since = since
			}
			if err := o.filter.Check(); err != nil {
				return usageError{err}
			}
			return followed(o.follow, p.events(cmd.Context(), o, func(e events.Event) error {
				if e.Time.Before(from) {
					return nil
				}
				return a.printSandboxEvent(e)
			}))
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&o.follow, "follow", "f", false, "print new events as they happen")
	f.StringVar(&since, "since", "", "only events after this cursor, time, \"now\", or this long ago, such as 10m")
	f.StringSliceVar(&o.filter.Types, "type", nil, "only events of these types, such as sandbox.woken or policy.*")
	f.StringVar(&o.filter.Sandbox, "sandbox", "", "only events of the sandbox with this name or id")
	f.StringVar(&o.filter.Owner, "owner", "", "only events of sandboxes of this owner")
	f.StringArrayVar(&o.filter.Tags, "tag", nil, "only events of sandboxes with this tag; repeatable")
	return cmd
}

// printSandboxEvent prints one event on a line of its own.
func (a *app) printSandboxEvent(e events.Event) error {
	words := []string{e.Time.Local().Format("2006-01-02 15:04:05.000"), fmt.Sprintf("%-22s", e.Type), dash(e.Sandbox), "by " + dash(string(e.Cause))}
	d := e.Details
	add := func(what, value string) {
		if value != "" {
			words = append(words, what+" "+value)
		}
	}
	add("was", d.From)
	add("fork of", d.Parent)
	add("children", strings.Join(d.Children, ","))
	if d.Template {
		add("template", d.Snapshot)
	} else {
		add("snapshot", d.Snapshot)
	}
	add("booted because", d.Booted)
	if d.Bytes > 0 {
		add("bytes", bytesText(d.Bytes))
	}
	if d.Milliseconds > 0 {
		add("took", fmt.Sprintf("%.1f ms", d.Milliseconds))
	}
	if !d.Expires.IsZero() {
		add("expires", d.Expires.Local().Format(daySecond))
	}
	add("hook", d.Hook)
	add("at", d.Event)
	add("reason", d.Reason)
	add("problem", d.Problem)
	if e.Type == events.Lost {
		words = append(words, fmt.Sprintf("events after %d were deleted before they were read", d.After))
	}
	return a.line(e, printable(strings.ReplaceAll(strings.Join(words, "  "), "\n", " ")))
}
