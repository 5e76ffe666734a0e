package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// policyTimeout bounds the wait for a VM that is just starting or falling asleep.
const policyTimeout = time.Minute

// policyFlag adds --policy, which names a file.
func policyFlag(cmd *cobra.Command, path *string, without string) {
	cmd.Flags().StringVar(path, "policy", "", "file with the network policy, - for stdin (default: "+without+")")
}

// policyFrom reads the file of --policy. It returns nil if the flag was not given.
func policyFrom(path string) (*netpolicy.Policy, error) {
	if path == "" {
		return nil, nil
	}
	return readPolicy(path)
}

func (a *app) policySetCommand() *cobra.Command {
	return &cobra.Command{
		Use: "set NAME FILE", Short: "Replace the network policy of a VM", Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeVM,
		Long: `Replace the network policy of a VM permanently. FILE may be - for stdin. If the VM runs, the new
policy is in force when the command returns, and cuts flows that it would not open. No packet
passes without a policy meanwhile. A VM that does not run starts with it.`,
		RunE: a.there(func(cmd *cobra.Command, args []string, at place) error {
			p, err := readPolicy(args[1])
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), policyTimeout)
			defer cancel()
			res, err := at.SetPolicy(ctx, args[0], p)
			if err != nil {
				return err
			}
			a.warnNetwork(res.Name, res.Network)
			return a.print(res, func(w io.Writer) {
				if res.Live {
					fmt.Fprintln(w, res.Name, "has the new policy")
				} else {
					fmt.Fprintln(w, res.Name, "will have the new policy when it runs")
				}
			})
		}),
	}
}

// warnNetwork warns of what a policy allows but the host does not do.
func (a *app) warnNetwork(name string, n *spec.NetworkInfo) {
	if n == nil {
		return
	}
	for _, w := range n.Warnings {
		a.log.Warn(w, "vm", name)
	}
}

func (a *app) policyShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Print the network policy of a VM", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, at place) error {
			p, err := at.Policy(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			text, err := policyText(p)
			return a.answer(p, err, func(w io.Writer) { fmt.Fprint(w, text) })
		}),
	}
}

// policyText returns a policy as YAML without empty fields.
func policyText(p *netpolicy.Policy) (string, error) {
	var n yaml.Node
	if err := n.Encode(p); err != nil {
		return "", fmt.Errorf("printing a policy: %w", err)
	}
	if !prune(&n) {
		return "# empty: everything is denied\n", nil
	}
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := errors.Join(e.Encode(&n), e.Close()); err != nil {
		return "", fmt.Errorf("printing a policy: %w", err)
	}
	return b.String(), nil
}

// prune removes fields that are empty, and reports whether anything is left.
func prune(n *yaml.Node) bool {
	switch n.Kind {
	case yaml.MappingNode:
		var kept []*yaml.Node
		for i := 0; i+1 < len(n.Content); i += 2 {
			// A resolver without upstreams still counts.
			if prune(n.Content[i+1]) || n.Content[i].Value == "dns" && n.Content[i+1].Kind == yaml.MappingNode {
				kept = append(kept, n.Content[i], n.Content[i+1])
			}
		}
		n.Content = kept
		return len(kept) > 0
	case yaml.SequenceNode:
		for _, e := range n.Content {
			if e.Kind == yaml.ScalarNode {
				n.Style |= yaml.FlowStyle
			} else {
				prune(e)
			}
		}
		return len(n.Content) > 0
	case yaml.ScalarNode:
		return n.ShortTag() != "!!null" && n.Value != ""
	}
	return true
}

func (a *app) policyDiffCommand() *cobra.Command {
	return &cobra.Command{
		Use: "diff NAME FILE", Short: "Compare the network policy of a VM with a file", Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeVM,
		Long: `Compare the network policy of a VM with a file (- for stdin). Lines that "policy set" would remove
begin with -, lines that it would add with +.`,
		RunE: a.there(func(cmd *cobra.Command, args []string, at place) error {
			p, err := readPolicy(args[1])
			if err != nil {
				return err
			}
			now, err := at.Policy(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			before, err1 := policyText(now)
			after, err2 := policyText(p)
			if err := errors.Join(err1, err2); err != nil {
				return err
			}
			d := policyDiff{Name: args[0], Same: before == after, Lines: diffLines(splitLines(before), splitLines(after))}
			return a.print(d, func(w io.Writer) {
				if d.Same {
					fmt.Fprintln(w, "no difference")
				}
				for _, l := range d.Lines {
					fmt.Fprintln(w, l)
				}
			})
		}),
	}
}

type policyDiff struct {
	Name string `json:"name"`
	Same bool   `json:"same"`
	// Lines are the lines that differ, with some around them.
	Lines []string `json:"lines"`
}

func splitLines(s string) []string { return strings.Split(strings.TrimSuffix(s, "\n"), "\n") }

// Limits of a comparison: lines shown around a change, and the most cells of the line by line comparison.
const (
	diffAround = 3
	diffCells  = 4 << 20
)

// diffLines compares lines by their longest common subsequence.
func diffLines(a, b []string) []string {
	first := 0
	for first < len(a) && first < len(b) && a[first] == b[first] {
		first++
	}
	last := 0
	for last < len(a)-first && last < len(b)-first && a[len(a)-1-last] == b[len(b)-1-last] {
		last++
	}
	out := []string{}
	if first == len(a) && first == len(b) {
		return out
	}
	for _, l := range a[max(0, first-diffAround):first] {
		out = append(out, "  "+l)
	}
	x, y := a[first:len(a)-last], b[first:len(b)-last]
	if len(x)*len(y) > diffCells {
		// Too long for a line by line comparison.
		for _, l := range x {
			out = append(out, "- "+l)
		}
		for _, l := range y {
			out = append(out, "+ "+l)
		}
		x, y = nil, nil
	}
	common := make([][]int32, len(x)+1)
	for i := range common {
		common[i] = make([]int32, len(y)+1)
	}
	for i := len(x) - 1; i >= 0; i-- {
		for j := len(y) - 1; j >= 0; j-- {
			if x[i] == y[j] {
				common[i][j] = common[i+1][j+1] + 1
			} else {
				common[i][j] = max(common[i+1][j], common[i][j+1])
			}
		}
	}
	for i, j := 0, 0; i < len(x) || j < len(y); {
		switch {
		case i < len(x) && j < len(y) && x[i] == y[j]:
			out = append(out, "  "+x[i])
			i, j = i+1, j+1
		case j == len(y) || i < len(x) && common[i+1][j] >= common[i][j+1]:
			out = append(out, "- "+x[i])
			i++
		default:
			out = append(out, "+ "+y[j])
			j++
		}
	}
	for _, l := range a[len(a)-last : len(a)-last+min(last, diffAround)] {
		out = append(out, "  "+l)
	}
	return out
}
