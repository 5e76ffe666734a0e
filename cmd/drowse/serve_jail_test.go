//go:build linux

package main

import (
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/jail/confine"
)

func TestServe_with_a_required_jail_needs_the_required_walls(t *testing.T) {
	walls := confine.Support{
		{Name: "seccomp", Present: true, Required: true}, {Name: "Landlock"},
		{Name: "namespaces", Present: true, Required: true},
	}
	if err := lacking(walls); err != nil {
		t.Errorf("all that is required is there: %v", err)
	}
	walls[2].Present, walls[2].Detail = false, "no net"
	if err := lacking(walls); err == nil || !strings.Contains(err.Error(), "namespaces is missing: no net") {
		t.Errorf("without namespaces: %v", err)
	}
}

func TestServe_with_a_required_jail_refuses_a_filter_that_only_logs(t *testing.T) {
	t.Setenv(control.RequireJailEnv, "")
	t.Setenv(control.SeccompEnv, control.SeccompLog)
	if err := requireJail(true); err == nil || !strings.Contains(err.Error(), control.SeccompEnv) {
		t.Errorf("%v", err)
	}
	if err := requireJail(false); err != nil {
		t.Errorf("without a required jail: %v", err)
	}
}
