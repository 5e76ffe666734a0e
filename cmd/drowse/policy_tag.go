//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
)

func (a *app) policyTagCommand() *cobra.Command {
	var add, remove []string
	cmd := &cobra.Command{
		Use: "tag NAME", Short: "Change the tags of a VM", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		Long: `Add or remove tags of a VM permanently, and print its tags. Policies of other VMs (agents) name it
by them. If the VM runs, the tags are in force when the command returns, and cut flows that
policies of others no longer open. A VM that does not run starts with them. It is no error to
add a tag twice, or to remove one that is not there.`,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), policyTimeout)
			defer cancel()
			res, err := s.Sandbox(args[0]).SetTags(ctx, add, remove)
			return a.answer(res, err, func(w io.Writer) { fmt.Fprintln(w, strings.Join(res.Tags, " ")) })
		}),
	}
	cmd.Flags().StringArrayVar(&add, "add", nil, "tag to add; repeatable")
	cmd.Flags().StringArrayVar(&remove, "remove", nil, "tag to remove; repeatable")
	cmd.MarkFlagsOneRequired("add", "remove")
	return cmd
}
