package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/netpolicy"
)

func (a *app) policyCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:   "policy",
		Short: "Check, explain, set and watch the network policies of VMs",
	}, append(a.policyVerbs(), a.policySchemaCommand(), a.policySetCommand(), a.policyShowCommand(), a.policyDiffCommand(), a.policyStatsCommand(), a.policyEventsCommand(), a.policyFlowsCommand())...)
}

// readPolicy reads a policy file, or stdin for "-". An invalid policy is a usage error.
func readPolicy(path string) (*netpolicy.Policy, error) {
	text, err := readInput("a policy", path, os.Stdin, netpolicy.MaxFileBytes)
	if err != nil {
		return nil, err
	}
	p, err := netpolicy.Parse(text)
	if err != nil {
		return nil, usageError{fmt.Errorf("%s: %w", path, err)}
	}
	return p, nil
}

func (a *app) policySchemaCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON schema of policy files, for editors",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := a.stdout.Write(netpolicy.Schema())
			return err
		},
	}
}
