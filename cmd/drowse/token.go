//go:build linux

package main

import (
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// tokenRow is a token as JSON.
type tokenRow struct {
	Name    string    `json:"name"`
	Scope   string    `json:"scope"`
	Owner   string    `json:"owner,omitempty"`
	Expires time.Time `json:"expires,omitzero"`
	Rate    int       `json:"rate,omitempty"`
	Token   string    `json:"token,omitempty"`
}

func rowOfToken(t tokens.Token) tokenRow {
	return tokenRow{Name: t.Name, Scope: t.Scopes.String(), Owner: t.Owner, Expires: t.Expires, Rate: t.Rate}
}

func (a *app) tokenCommand() *cobra.Command {
	var (
		file, scope, lasts string
		want               tokens.Token
		e2b                bool
	)
	onTokens := func(do func(_ *cobra.Command, args []string, t *tokens.Store) error) runE {
		return opened(func() (*tokens.Store, error) {
			s, err := a.store()
			if err != nil {
				return nil, err
			}
			return tokensOf(file, s), nil
		}, do)
	}
	create := &cobra.Command{
		Use: "create NAME", Annotations: makesState, Short: "Create a token and print it once", Args: cobra.ExactArgs(1),
		Long: `Create a token for the HTTP API over TCP and print it. drowse keeps only its hash. Scopes:

  read     what is known about sandboxes, snapshots and images
  exec     commands, terminals, processes and ports in sandboxes
  files    their files
  create   making, changing and removing them, with policies, secrets and services
  admin    what they share: images, volumes, imports, pruning

With --owner the token reaches only that owner's sandboxes, and makes only such.`,
		RunE: onTokens(func(_ *cobra.Command, args []string, t *tokens.Store) (err error) {
			want.Name = args[0]
			if want.Scopes, err = tokens.ParseScopes(scope); err != nil {
				return usageError{err}
			}
			if lasts != "" {
				d, err := lifetime.ParseDuration(lasts)
				if err != nil {
					return usageError{fmt.Errorf("--expires: %w", err)}
				}
				want.Expires = time.Now().Add(d).UTC().Truncate(time.Second)
			}
			make := t.Create
			if e2b {
				make = t.CreateE2B
			}
			token, err := make(want)
			row := rowOfToken(want)
			row.Token = token
			return a.answer(row, err, func(w io.Writer) { fmt.Fprintln(w, token) })
		}),
	}
	f := create.Flags()
	f.StringVar(&scope, "scope", string(tokens.ScopeRead), "what the token allows, with commas, or write for all")
	f.StringVar(&want.Owner, "owner", "", "reach only sandboxes of this owner")
	f.StringVar(&lasts, "expires", "", "end after this time, such as 12h or 30d (default: never)")
	f.BoolVar(&e2b, "e2b", false, "make it in the form of a key that E2B's clients take (docs/guides/e2b.md)")
	f.IntVar(&want.Rate, "rate", 0, "requests a second; 0: no limit")
	cmd := group(&cobra.Command{Use: "token", Short: "Manage tokens of the HTTP API"},
		create,
		&cobra.Command{
			Use: "ls", Short: "List tokens, without their secrets", Args: cobra.NoArgs,
			RunE: onTokens(func(_ *cobra.Command, _ []string, t *tokens.Store) error {
				all, err := t.Read()
				var rows []tokenRow
				for _, t := range all {
					rows = append(rows, rowOfToken(t))
				}
				return answerList(a, rows, err, "NAME\tSCOPE\tOWNER\tEXPIRES\tRATE", func(r tokenRow) []any {
					expires, rate := "never", "-"
					if !r.Expires.IsZero() {
						expires = r.Expires.Local().Format(dayMinute)
					}
					if r.Rate != 0 {
						rate = strconv.Itoa(r.Rate) + "/s"
					}
					return []any{r.Name, r.Scope, dash(r.Owner), expires, rate}
				})
			}),
		},
		&cobra.Command{
			Use: "rm NAME", Short: "Remove a token, which is invalid from then on", Args: cobra.ExactArgs(1),
			RunE: onTokens(func(_ *cobra.Command, args []string, t *tokens.Store) error {
				return a.answer(map[string]string{"removed": args[0]}, t.Remove(args[0]), func(w io.Writer) { fmt.Fprintln(w, args[0]) })
			}),
		},
	)
	cmd.PersistentFlags().StringVar(&file, "token-file", "", "file with tokens (default "+tokens.File+" in the state directory)")
	return cmd
}
