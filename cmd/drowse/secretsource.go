//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/sources"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// sources returns the sources of secrets in the state directory.
func (a *app) sources(h *sandbox.Host) *sources.Store {
	return sources.Open(filepath.Join(h.State.Dir(), sources.File), a.log)
}

// secretsFrom returns the Secrets of a pool.Launcher: the values of secrets that have sources. Only "drowse serve" has
// an environment and credentials for them: other commands ask it.
func (a *app) secretsFrom(h *sandbox.Host, serving bool) func(context.Context, string, []spec.SecretFile) ([]spec.Secret, error) {
	known := a.sources(h)
	return func(ctx context.Context, vm string, awaited []spec.SecretFile) ([]spec.Secret, error) {
		m, err := h.State.Metadata(vm)
		if err != nil {
			return nil, err
		}
		var ask func(context.Context, spec.SecretFile) error
		if !serving {
			ask = func(ctx context.Context, f spec.SecretFile) error { return askServe(ctx, h, vm, f) }
		}
		return known.Secrets(ctx, m.Owner, awaited, ask)
	}
}

// askServe has "drowse serve" hand in a secret.
func askServe(ctx context.Context, h *sandbox.Host, vm string, f spec.SecretFile) error {
	c := client.Unix(filepath.Join(h.State.Dir(), api.SocketFile))
	defer c.Close()
	if err := c.Sandbox(vm).SetSecret(ctx, spec.Secret{SecretFile: f}); err != nil {
		return fmt.Errorf("source %s is in the environment of `drowse serve`, which was asked: %w", f.From, err)
	}
	return nil
}

// sourceRow is a source as JSON.
type sourceRow struct {
	Name   string   `json:"name"`
	Origin string   `json:"origin"`
	Owners []string `json:"owners"`
	All    bool     `json:"all_owners,omitempty"`
}

// secretVerbs are the commands on secrets that need the host.
func (a *app) secretVerbs() []*cobra.Command { return []*cobra.Command{a.secretSourceCommand()} }

func (a *app) secretSourceCommand() *cobra.Command {
	var (
		owners []string
		all    bool
	)
	add := &cobra.Command{
		Use: "add [flags] NAME ORIGIN [ARG...]", Annotations: makesState, Short: "Add or replace a source", Args: cobra.MinimumNArgs(2),
		Long: `Add or replace a source of secrets. ORIGIN is one of

  file:PATH              a file
  command:PATH [ARG...]  what a program prints, without a shell, within ` + sources.CommandTime.String() + `
  env:VARIABLE           a variable of "drowse serve"
  credential:NAME        a credential that systemd gives to "drowse serve" (LoadCredential=)

A sandbox gets the value at each wake and boot. Who may use a source of a sandbox can read its
value. Sandboxes without an owner may have every source.`,
		Example: `  drowse secret source add db file:/etc/keys/db
  drowse secret source add --owner alice vault command:/usr/bin/vault kv get -field=key secret/alice
  drowse secret set dev DB=from:db`,
		RunE: a.onHost(func(_ *cobra.Command, args []string, s *sandbox.Host) error {
			one, err := sources.Parse(args[0], args[1], args[2:]...)
			if err != nil {
				return usageError{err}
			}
			one.Owners, one.AllOwners = owners, all
			err = a.sources(s).Add(one)
			return a.answer(rowOfSource(one), err, func(w io.Writer) { fmt.Fprintln(w, one.Name) })
		}),
	}
	add.Flags().SetInterspersed(false) // flags after NAME are the command's
	add.Flags().StringArrayVar(&owners, "owner", nil, "let sandboxes of this owner have it; repeatable")
	add.Flags().BoolVar(&all, "all-owners", false, "let every sandbox have it")
	return group(&cobra.Command{
		Use: "source", Short: "Say where secrets may come from",
		Long: `Say where secrets may come from: the file ` + sources.File + ` of the state directory. A secret with a
source has its value after each wake and boot, without a person.`,
	}, add,
		&cobra.Command{
			Use: "ls", Short: "List sources, without values", Args: cobra.NoArgs,
			RunE: a.onHost(func(_ *cobra.Command, _ []string, s *sandbox.Host) error {
				list, err := a.sources(s).Read()
				var rows []sourceRow
				for _, one := range list {
					rows = append(rows, rowOfSource(one))
				}
				return answerList(a, rows, err, "SOURCE\tORIGIN\tOWNERS", func(r sourceRow) []any {
					who := dash(strings.Join(r.Owners, ","))
					if r.All {
						who = "all"
					}
					return []any{r.Name, r.Origin, who}
				})
			}),
		},
		&cobra.Command{
			Use: "rm SOURCE...", Short: "Remove sources; secrets from them have no value after the next wake", Args: cobra.MinimumNArgs(1),
			RunE: a.onHost(func(_ *cobra.Command, args []string, s *sandbox.Host) error {
				return removeAll(a, args, func(name string) (string, error) { return name, a.sources(s).Remove(name) })
			}),
		},
	)
}

func rowOfSource(s sources.Source) sourceRow {
	r := sourceRow{Name: s.Name, Origin: s.Origin(), Owners: s.Owners, All: s.AllOwners}
	if r.Owners == nil {
		r.Owners = []string{}
	}
	return r
}
