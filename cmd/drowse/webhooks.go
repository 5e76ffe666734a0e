//go:build linux

package main

import (
	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/events"
)

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
