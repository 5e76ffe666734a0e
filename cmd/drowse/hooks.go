package main

import (
	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/guest/report"
)

// hooksFlag adds the flag of commands that first run hooks in the guest.
func hooksFlag(cmd *cobra.Command, hooks *string) {
	cmd.Flags().StringVar(hooks, "hooks", "", "hooks in the guest, and on the host before a sleep: require them to succeed, ignore their failures, or skip them (default: as the VM was created)")
}

// warnHooks logs each hook in the guest that failed.
func (a *app) warnHooks(vm string, failures []report.HookFailure) {
	for _, f := range failures {
		a.log.Warn("hook in the guest failed", "vm", vm, "hook", f.Name, "event", string(f.Event), "problem", f.Problem, "output", f.Output)
	}
}

// warnHostHooks logs each hook on the host that failed.
func (a *app) warnHostHooks(vm string, failures []report.HookFailure) {
	for _, f := range failures {
		a.log.Warn("hook on the host failed", "vm", vm, "hook", f.Name, "event", string(f.Event), "problem", f.Problem, "output", f.Output)
	}
}
