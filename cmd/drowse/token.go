package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api"
)

func (a *app) tokenCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "token", Short: "Make and take away tokens of the HTTP API", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var file string
	cmd.PersistentFlags().StringVar(&file, "token-file", "", "file with tokens (default "+api.TokensFile+" in the state directory)")
	tokens := func() (api.Tokens, error) {
		s, err := a.store()
		if err != nil {
			return api.Tokens{}, err
		}
		return tokensOf(file, s), nil
	}
	var scope string
	create := &cobra.Command{
		Use: "create NAME", Annotations: makesState, Short: "Make a token and print it, once", Args: cobra.ExactArgs(1),
		Long: `Make a token and print it. It is not kept: the file has its hash. Whoever has it may use
the HTTP API over TCP, from now on: to read, or with --scope write to do everything, which is
as much as root may in the sandboxes.`,
		RunE: func(_ *cobra.Command, args []string) error {
			t, err := tokens()
			if err != nil {
				return err
			}
			token, err := t.Create(args[0], api.Scope(scope))
			return a.answer(map[string]string{"name": args[0], "scope": scope, "token": token}, err, func(w io.Writer) { fmt.Fprintln(w, token) })
		},
	}
	create.Flags().StringVar(&scope, "scope", string(api.ScopeRead), "what it is good for: read or write")
	list := &cobra.Command{
		Use: "ls", Short: "List names and scopes of tokens", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			t, err := tokens()
			if err != nil {
				return err
			}
			all, err := t.Read()
			if err != nil {
				return err
			}
			type row struct {
				Name  string    `json:"name"`
				Scope api.Scope `json:"scope"`
			}
			rows := []row{}
			for _, t := range all {
				rows = append(rows, row{t.Name, t.Scope})
			}
			return a.print(rows, func(w io.Writer) {
				for t, r := range table(w, "NAME\tSCOPE", rows) {
					fmt.Fprintf(t, "%s\t%s\n", r.Name, r.Scope)
				}
			})
		},
	}
	remove := &cobra.Command{
		Use: "rm NAME", Short: "Take a token away: it is of no use from then on", Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			t, err := tokens()
			if err != nil {
				return err
			}
			err = t.Remove(args[0])
			return a.answer(map[string]string{"removed": args[0]}, err, func(w io.Writer) { fmt.Fprintln(w, args[0]) })
		},
	}
	cmd.AddCommand(create, list, remove)
	return cmd
}
