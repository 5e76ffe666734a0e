package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func (a *app) templateCommand() *cobra.Command {
	return group(&cobra.Command{
		Use: "template", Short: "Manage templates: first boots, from which new VMs start",
		Long: `Manage templates. A template is the memory and the disk of a VM that has booted, and run
/bin/sh -c : once. A new VM of the same image, kernel, RAM, vCPUs, disk size, network and kernel
parameters starts from it instead of booting. If there is none it boots and asks for one, which
"drowse serve" then makes, or a process that "drowse run" leaves behind.`,
	}, append(a.templateVerbs(), a.templateMakeCommand(), a.templateListCommand(), a.templateRemoveCommand())...)
}

func (a *app) templateMakeCommand() *cobra.Command {
	var want wire.TemplateSpec
	limit := bootTimeout
	cmd := &cobra.Command{
		Use: "make [IMAGE]", Short: "Make the template of an image and a size; without IMAGE, those that VMs have asked for", Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: a.firstArg(a.completeImage),
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), limit)
			defer cancel()
			var of *wire.TemplateSpec
			if len(args) > 0 {
				want.Image = args[0]
				of = &want
			}
			made, err := p.makeTemplate(ctx, of)
			return a.answerTemplates(made, err)
		}),
	}
	f := cmd.Flags()
	f.StringVar(&want.Kernel, "kernel", "", `kernel, as for run`)
	f.IntVar(&want.VCPUs, "vcpus", 0, fmt.Sprintf("number of CPUs (default %d)", spec.DefaultVCPUs))
	f.VarP((*mebibytes)(&want.MemoryMiB), "memory", "m", fmt.Sprintf("RAM, 64m to 16g; a number alone is MiB (default %d)", spec.DefaultMemoryMiB))
	f.Var((*mebibytes)(&want.DiskMiB), "disk", fmt.Sprintf("size of the writable disk, such as 20g; a number alone is MiB (default %d)", spec.DefaultDiskMiB))
	f.StringVar(&want.Network, "net", "", "network: none or tap (default none)")
	f.BoolVar(&want.IPv6, "ipv6", false, "with --net tap: IPv6 as well")
	f.StringVar(&want.Cmdline, "cmdline", "", "additional kernel parameters")
	f.BoolVar(&want.NoACPI, "no-acpi", false, "describe devices on the kernel's command line")
	f.DurationVar(&limit, "timeout", limit, "give up after this time")
	return cmd
}

// templateDoc is a template as JSON, and templateInfo one in a list.
type templateDoc struct {
	Version  int       `json:"version"`
	Key      string    `json:"key"`
	Spec     spec.VM   `json:"spec"`
	Snapshot string    `json:"snapshot,omitempty"` // empty if it is asked for
	Created  time.Time `json:"created,omitzero"`
	Problem  string    `json:"problem,omitempty"`
	Tried    time.Time `json:"tried,omitzero"` // not from a server
}

type templateInfo struct {
	templateDoc
	Used   time.Time `json:"used"`
	Stored int64     `json:"stored_bytes"`
}

func (a *app) answerTemplates(list []templateDoc, err error) error {
	return a.answer(some(list), err, func(w io.Writer) {
		for _, e := range list {
			fmt.Fprintf(w, "%.12s\n", e.Key)
		}
	})
}

func (a *app) templateListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List templates, and those that are asked for", Args: cobra.NoArgs,
		RunE: a.there(func(cmd *cobra.Command, _ []string, p place) error {
			list, err := p.templates(cmd.Context())
			return errors.Join(err, answerList(a, list, nil, "TEMPLATE\tIMAGE\tKERNEL\tVCPUS\tRAM\tDISK\tNETWORK\tSTORED\tUSED\tSTATE", func(i templateInfo) []any {
				ready := cmp.Or(i.Problem, "asked for")
				if i.Snapshot != "" {
					ready = "ready"
				}
				return []any{fmt.Sprintf("%.12s", i.Key), fmt.Sprintf("%.12s", i.Spec.Image), i.Spec.Kernel, i.Spec.VCPUs, bytesText(int64(i.Spec.Memory())),
					bytesText(int64(i.Spec.DiskMiB) << 20), i.Spec.Network, bytesText(i.Stored), i.Used.Local().Format(dayMinute), ready}
			}))
		}),
	}
}

func (a *app) templateRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm TEMPLATE...", Short: "Remove templates; VMs made from them stay as they are", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeTemplate,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			return removeAll(a, args, func(word string) (string, error) {
				key, err := p.removeTemplate(cmd.Context(), word)
				return fmt.Sprintf("%.12s", key), err
			})
		}),
	}
}

func (a *app) completeTemplate(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return completions(a.place, func(p place) (keys []string) {
		list, _ := p.templates(cmd.Context()) // only the readable ones
		for _, t := range list {
			keys = append(keys, fmt.Sprintf("%.12s", t.Key))
		}
		return keys
	})
}
