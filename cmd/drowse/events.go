package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

func (a *app) eventsCommand() *cobra.Command {
	var (
		follow bool
		since  string
		o      events.ReadOptions
	)
	cmd := &cobra.Command{
		Use: "events", Short: "Show the events of sandboxes: created, woken, put to sleep, removed and more", Args: cobra.NoArgs,
		Long: `Show the events of sandboxes, the oldest first: created, woken, put to sleep, forked, removed and
so on, each with its cause. --follow continues until it is interrupted. With -o json each event
is one line; --since takes its "cursor". drowse keeps 16 MiB and 30 days of events at most.`,
		RunE: a.onHost(func(cmd *cobra.Command, _ []string, s *sandbox.Host) error {
			j := s.State.Events()
			var from time.Time
			var err error
			if d, derr := lifetime.ParseDuration(since); derr == nil && since != "" && strings.ContainsAny(since, "smhd") {
				from = time.Now().Add(-d)
			} else if t, terr := time.Parse(time.RFC3339Nano, since); terr == nil {
				from = t
			} else if o.Since, err = j.ParseCursor(since); err != nil {
				return usageError{fmt.Errorf("--since: %w, a time as 2026-11-22T13:25:42Z, or one ago as 10m", err)}
			}
			if err := o.Filter.Check(); err != nil {
				return usageError{err}
			}
			give := func(e events.Event) error {
				if e.Time.Before(from) {
					return nil
				}
				return a.printSandboxEvent(e)
			}
			if !follow {
				_, err = j.Read(cmd.Context(), o, give)
				return err
			}
			return followed(true, j.Follow(cmd.Context(), o, give))
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&follow, "follow", "f", false, "print new events as they happen")
	f.StringVar(&since, "since", "", "only events after this cursor, time, \"now\", or this long ago, such as 10m")
	f.StringSliceVar(&o.Filter.Types, "type", nil, "only events of these types, such as sandbox.woken or policy.*")
	f.StringVar(&o.Filter.Sandbox, "sandbox", "", "only events of the sandbox with this name or id")
	f.StringVar(&o.Filter.Owner, "owner", "", "only events of sandboxes of this owner")
	f.StringArrayVar(&o.Filter.Tags, "tag", nil, "only events of sandboxes with this tag; repeatable")
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

// webhookFlags say where "drowse serve" sends events.
type webhookFlags struct{ url, secretFile, file string }

func (w *webhookFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&w.url, "webhook", "", "send events to this address (see \"drowse events\")")
	f.StringVar(&w.secretFile, "webhook-secret-file", "", "file with the secret that signs deliveries to --webhook; only its owner may have access to it")
	cmd.MarkFlagsRequiredTogether("webhook", "webhook-secret-file")
	f.StringVar(&w.file, "webhooks", "", "JSON file with more webhooks: [{\"url\":..., \"secret_file\":..., \"types\":[...], \"owner\":...}]")
}

func (w *webhookFlags) hooks() (out []events.Webhook, err error) {
	if w.file != "" {
		if out, err = events.ReadWebhooks(w.file); err != nil {
			return nil, err
		}
	}
	if w.url != "" {
		secret, err := events.ReadSecret(w.secretFile)
		if err != nil {
			return nil, err
		}
		out = append(out, events.Webhook{URL: w.url, Secret: secret})
	}
	for _, h := range out {
		if err := h.Check(); err != nil {
			return nil, usageError{err}
		}
	}
	return out, nil
}
