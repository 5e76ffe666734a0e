package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api"
)

func (a *app) tokenCommand() *cobra.Command {
	var file, scope string
	var e2b bool
	onTokens := func(do func(_ *cobra.Command, args []string, t api.Tokens) error) runE {
		return opened(func() (api.Tokens, error) {
			s, err := a.store()
			if err != nil {
				return api.Tokens{}, err
			}
			return tokensOf(file, s), nil
		}, do)
	}
	create := &cobra.Command{
		Use: "create NAME", Annotations: makesState, Short: "Create a token and print it once", Args: cobra.ExactArgs(1),
		Long: `Create a token and print it. drowse keeps only its hash. The token gives access to the HTTP API
over TCP: to read, or with --scope write to do everything, which includes root in the sandboxes.`,
		RunE: onTokens(func(_ *cobra.Command, args []string, t api.Tokens) error {
			make := t.Create
			if e2b {
				make = t.CreateE2B
			}
			token, err := make(args[0], api.Scope(scope))
			return a.answer(map[string]string{"name": args[0], "scope": scope, "token": token}, err, func(w io.Writer) { fmt.Fprintln(w, token) })
		}),
	}
	create.Flags().StringVar(&scope, "scope", string(api.ScopeRead), "what the token allows: read or write")
	create.Flags().BoolVar(&e2b, "e2b", false, "make it in the form of a key that E2B's clients take (docs/guides/e2b.md)")
	cmd := group(&cobra.Command{Use: "token", Short: "Manage tokens of the HTTP API"},
		create,
		&cobra.Command{
			Use: "ls", Short: "List the names and scopes of tokens", Args: cobra.NoArgs,
			RunE: onTokens(func(_ *cobra.Command, _ []string, t api.Tokens) error {
				type row struct {
					Name  string    `json:"name"`
					Scope api.Scope `json:"scope"`
				}
				all, err := t.Read()
				var rows []row
				for _, t := range all {
					rows = append(rows, row{t.Name, t.Scope})
				}
				return answerList(a, rows, err, "NAME\tSCOPE", func(r row) []any { return []any{r.Name, r.Scope} })
			}),
		},
		&cobra.Command{
			Use: "rm NAME", Short: "Remove a token, which is invalid from then on", Args: cobra.ExactArgs(1),
			RunE: onTokens(func(_ *cobra.Command, args []string, t api.Tokens) error {
				return a.answer(map[string]string{"removed": args[0]}, t.Remove(args[0]), func(w io.Writer) { fmt.Fprintln(w, args[0]) })
			}),
		},
	)
	cmd.PersistentFlags().StringVar(&file, "token-file", "", "file with tokens (default "+api.TokensFile+" in the state directory)")
	return cmd
}
