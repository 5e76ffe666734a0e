package main

import (
	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/report"
)

// hooksFlag adds the flag of commands that run hooks in the guest first.
func hooksFlag(cmd *cobra.Command, hooks *string) {
	cmd.Flags().StringVar(hooks, "hooks", "", "failures of hooks in the guest, and on the host before a sleep: require success, ignore failures, or skip hooks (default: as the VM was created)")
}

// warnHooks tells of hooks that have failed, each in one line.
func (a *app) warnHooks(vm string, failures []guest.HookFailure) {
	for _, f := range failures {
		a.log.Warn("hook in the guest failed", "vm", vm, "hook", f.Name, "event", string(f.Event), "problem", f.Problem, "output", f.Output)
	}
}

// warnHostHooks tells of hooks on the host that have failed, each in one line.
func (a *app) warnHostHooks(vm string, failures []report.HookFailure) {
	for _, f := range failures {
		a.log.Warn("hook on the host failed", "vm", vm, "hook", f.Name, "event", string(f.Event), "problem", f.Problem, "output", f.Output)
	}
}
