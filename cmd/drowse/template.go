//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/template"
)

func (a *app) templateCommand() *cobra.Command {
	return group(&cobra.Command{
		Use: "template", Short: "Manage templates: first boots, from which new VMs start",
		Long: `Manage templates. A template is the memory and the disk of a VM that has booted, and run
/bin/sh -c : once. A new VM of the same image, kernel, RAM, vCPUs, disk size, network and kernel
parameters starts from it instead of booting. If there is none it boots and asks for one, which
"drowse serve" then makes, or a process that "drowse run" leaves behind.`,
	}, a.templateMakeCommand(), a.templateListCommand(), a.templateRemoveCommand(), a.templatePruneCommand())
}

func (a *app) templateMakeCommand() *cobra.Command {
	var want sandbox.Spec
	limit := bootTimeout
	cmd := &cobra.Command{
		Use: "make [IMAGE]", Short: "Make the template of an image and a size; without IMAGE, those that VMs have asked for", Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := a.launching(cmd.Context())
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), limit)
			defer cancel()
			var of []sandbox.Spec
			if len(args) > 0 {
				want.Image = args[0]
				of = append(of, want)
			}
			made, err := s.MakeTemplates(ctx, of...)
			return a.answerTemplates(made, err)
		},
	}
	f := cmd.Flags()
	f.StringVar(&want.Kernel, "kernel", "", `as of "drowse run", like all flags here that say what the VM is`)
	f.IntVar(&want.VCPUs, "vcpus", 0, fmt.Sprintf("number of CPUs (default %d)", spec.DefaultVCPUs))
	f.IntVar(&want.MemoryMiB, "memory", 0, fmt.Sprintf("RAM in MiB (default %d)", spec.DefaultMemoryMiB))
	f.IntVar(&want.DiskMiB, "disk", 0, fmt.Sprintf("size of the writable disk in MiB (default %d)", spec.DefaultDiskMiB))
	f.StringVar(&want.Network, "net", "", "network: none or tap (default none)")
	f.BoolVar(&want.IPv6, "ipv6", false, "with --net tap: IPv6 as well")
	f.StringVar(&want.Cmdline, "cmdline", "", "additional kernel parameters")
	f.BoolVar(&want.NoACPI, "no-acpi", false, "describe devices on the kernel's command line")
	f.DurationVar(&limit, "timeout", limit, "give up after this time")
	return cmd
}

// templateInfo is a template as JSON.
type templateInfo struct {
	template.Entry
	Used   time.Time `json:"used"`
	Stored int64     `json:"stored_bytes"`
}

func (a *app) answerTemplates(list []template.Entry, err error) error {
	return a.answer(some(list), err, func(w io.Writer) {
		for _, e := range list {
			fmt.Fprintf(w, "%.12s\n", e.Key)
		}
	})
}

func (a *app) templateListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List templates, and those that are asked for", Args: cobra.NoArgs,
		RunE: a.onHost(func(_ *cobra.Command, _ []string, s *sandbox.Host) error {
			entries, _, listErr := s.State.Templates().List()
			var list []templateInfo
			for _, e := range entries {
				i := templateInfo{Entry: e, Used: e.Used}
				if e.Ready() {
					i.Stored, _ = state.DiskUsage(s.State.SnapshotDir(e.Snapshot))
				}
				list = append(list, i)
			}
			return errors.Join(listErr, answerList(a, list, nil, "TEMPLATE\tIMAGE\tKERNEL\tVCPUS\tRAM\tDISK\tNETWORK\tSTORED\tUSED\tSTATE", func(i templateInfo) []any {
				ready := cmp.Or(i.Problem, "asked for")
				if i.Ready() {
					ready = "ready"
				}
				return []any{i.Key[:12], fmt.Sprintf("%.12s", i.Spec.Image), i.Spec.Kernel, i.Spec.VCPUs, bytesText(int64(i.Spec.Memory())),
					bytesText(int64(i.Spec.DiskMiB) << 20), i.Spec.Network, bytesText(i.Stored), i.Used.Local().Format(dayMinute), ready}
			}))
		}),
	}
}

func (a *app) templateRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm TEMPLATE...", Short: "Remove templates; VMs made from them stay as they are", Args: cobra.MinimumNArgs(1),
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			return removeAll(a, args, func(word string) (string, error) {
				e, err := s.State.Templates().Find(word)
				if err != nil {
					return "", err
				}
				return e.Key[:12], s.State.RemoveTemplates(cmd.Context(), e)
			})
		}),
	}
}

func (a *app) templatePruneCommand() *cobra.Command {
	return &cobra.Command{
		Use: "prune", Short: "Remove the templates that no new VM would start from, such as those of removed images", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := a.launching(cmd.Context())
			if err != nil {
				return err
			}
			gone, err := s.PruneTemplates(cmd.Context())
			return a.answerTemplates(gone, err)
		},
	}
}

// makeTemplateOf makes the template of an image in the sizes that a VM has by default.
func (a *app) makeTemplateOf(ctx context.Context, img *image.Image) error {
	s, err := a.launching(ctx)
	if err == nil {
		_, err = s.MakeTemplates(ctx, sandbox.Spec{Image: img.ID})
	}
	return err
}

// lowest is the lowest priority of a process (nice(2)).
const lowest = 19

// makeTemplatesLater starts a process that makes the templates that VMs have asked for, and does not wait for it. With
// "drowse serve" that does it.
func (a *app) makeTemplatesLater(s *sandbox.Host, name string) {
	r, err := s.State.Load(name)
	if err != nil || r.Template != "" || !s.State.Templates().AnyDue(time.Now()) {
		return
	}
	if c, err := net.Dial("unixpacket", s.State.PoolSocket()); err == nil {
		c.Close()
		return
	}
	program, err := os.Executable()
	if err != nil {
		return
	}
	cmd := exec.Command(program, "--state", s.State.Dir(), "template", "make")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		a.log.Warn("templates are not made", "error", err)
		return
	}
	// It and the VM that it boots come after all else.
	_ = unix.Setpriority(unix.PRIO_PROCESS, cmd.Process.Pid, lowest)
	_ = cmd.Process.Release()
}
