//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox/mcp"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func (a *app) mcpCommand() *cobra.Command {
	o := mcp.Options{Owner: "mcp", Sandboxes: 8, VCPUs: 2, MemoryMiB: 2048, DiskMiB: spec.DefaultDiskMiB, Sleep: 5 * time.Minute, Version: version()}
	plainHTTP := false
	cmd := &cobra.Command{
		Use: "mcp", Annotations: makesState, Args: cobra.NoArgs,
		Short: "Serve sandboxes as tools to a language model, over stdin and stdout",
		Long: `Serve sandboxes as tools to a language model by the Model Context Protocol, over stdin and stdout. A
client, such as an editor or a desktop application, starts this command (docs/guides/mcp.md).

The flags say all that the model may do. It sees the sandboxes of one owner and nothing of the
host's files. Its sandboxes have no network but what --allow-net names. They are made from
images of the host; with --image only from those, which are pulled if they are missing.

The command ends when stdin does. Commands that run then are killed. Sandboxes stay, and sleep
when they are idle (--sleep-after).`,
		Example: `  drowse mcp --image python:3.12 --allow-net pypi.org --allow-net files.pythonhosted.org
  drowse mcp --owner notes --max-sandboxes 2`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Policy = modelPolicy
			if len(o.Allow) > 0 { // mistakes are the user's, and come before the first call
				if _, err := modelPolicy(o.Allow); err != nil {
					return err
				}
			}
			h, err := a.launching(cmd.Context())
			if err != nil {
				return err
			}
			o.Host = h
			o.Image = func(ctx context.Context, name string, progress func(string, int64, int64)) (*image.Image, error) {
				p := pullFlags{when: pullNever, plainHTTP: plainHTTP, tell: progress}
				if len(o.Images) > 0 {
					p.when = pullMissing
				}
				return p.image(ctx, a, h, name)
			}
			o.Booted = func(name string) { a.makeTemplatesLater(h, name) }
			if a.verbose {
				o.Log = a.log
			}
			s, err := mcp.New(o)
			if err != nil {
				return usageError{err}
			}
			return s.Serve(cmd.Context(), os.Stdin, raw(a.stdout))
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Owner, "owner", o.Owner, "owner of the model's sandboxes; it sees no others")
	f.BoolVar(&o.All, "all", false, "let the model use, change and delete the sandboxes of all owners")
	f.StringArrayVar(&o.Images, "image", nil, "the only images for sandboxes, pulled if missing, the first by default; repeatable (default: those of the host, and none is pulled)")
	f.BoolVar(&plainHTTP, "plain-http", false, "talk to the registry without TLS")
	f.StringArrayVar(&o.Allow, "allow-net", nil, "a destination that the model may allow a sandbox: open (all public addresses), or as --allow of \"drowse run\"; repeatable (default: no network)")
	f.IntVar(&o.Sandboxes, "max-sandboxes", o.Sandboxes, "most sandboxes, awake or asleep")
	f.Var((*cpus)(&o.VCPUs), "max-vcpus", "most CPUs of a sandbox")
	f.Var((*mebibytes)(&o.MemoryMiB), "max-memory", "most RAM of a sandbox; a number alone is MiB")
	f.Var((*mebibytes)(&o.DiskMiB), "disk", "size of a sandbox's disk; a number alone is MiB")
	f.DurationVar(&o.Sleep, "sleep-after", o.Sleep, "how long a sandbox is idle before it sleeps; 0 is never")
	return cmd
}

// modelPolicy returns the policy of destinations that a model has chosen from those of --allow-net.
func modelPolicy(allow []string) (*netpolicy.Policy, error) {
	n := netFlags{allow: slices.DeleteFunc(slices.Clone(allow), func(w string) bool { return w == netOpen })}
	if slices.Contains(allow, netOpen) {
		n.net = netOpen
	}
	p, err := n.common()
	if err != nil {
		return nil, fmt.Errorf("destinations of --allow-net: %w", err)
	}
	return p, nil
}
