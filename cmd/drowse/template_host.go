//go:build linux

package main

import (
	"context"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
)

// templateVerbs are the commands on templates that need the host.
func (a *app) templateVerbs() []*cobra.Command { return []*cobra.Command{a.templatePruneCommand()} }

func (a *app) templatePruneCommand() *cobra.Command {
	return &cobra.Command{
		Use: "prune", Short: "Remove the templates that no new VM would start from, such as those of removed images", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := a.launching(cmd.Context())
			if err != nil {
				return err
			}
			gone, err := s.PruneTemplates(cmd.Context())
			return a.answerTemplates(templateDocs(gone), err)
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
