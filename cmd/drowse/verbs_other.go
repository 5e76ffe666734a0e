//go:build !linux

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// tracing is of commands on the host of VMs.
type tracing struct{}

func (*app) endTraces(context.Context) {}

// errNoHost is the error of a command without a server.
var errNoHost = usageError{errors.New("VMs run on Linux: name a server with --host URL, $DROWSE_HOST or `drowse context use`; it is a host with `drowse serve --listen`")}

func (*app) local() (place, error) { return nil, errNoHost }

// elsewhere returns commands that say why they do not work here: those of a group, or of the program if it is "".
func (a *app) elsewhere(group string) (all []*cobra.Command) {
	for _, path := range slices.Sorted(maps.Keys(hostWork)) {
		name, in := path, ""
		if i := strings.LastIndexByte(path, ' '); i >= 0 {
			in, name = path[:i], path[i+1:]
		}
		if in != group {
			continue
		}
		all = append(all, &cobra.Command{
			Use: name, Hidden: true, DisableFlagParsing: true, Short: "Works on the host of VMs only",
			RunE: func(*cobra.Command, []string) error {
				return usageError{fmt.Errorf("`drowse %s` works on the host of VMs only: %s: use it there", path, hostWork[path])}
			},
		})
	}
	return all
}

func (a *app) hostVerbs() []*cobra.Command     { return a.elsewhere("") }
func (a *app) imageVerbs() []*cobra.Command    { return a.elsewhere("image") }
func (a *app) snapshotVerbs() []*cobra.Command { return a.elsewhere("snapshot") }
func (a *app) secretVerbs() []*cobra.Command   { return a.elsewhere("secret") }
func (a *app) policyVerbs() []*cobra.Command   { return a.elsewhere("policy") }
func (a *app) templateVerbs() []*cobra.Command { return a.elsewhere("template") }

func isMissingImage(error) bool { return false }

// errorCode returns the code of a server's error, or "".
func errorCode(err error) string {
	var e *records.Error
	if errors.As(err, &e) {
		return string(e.Code)
	}
	for _, c := range spec.ErrorCodes {
		if errors.Is(err, c.Err) {
			return c.Code
		}
	}
	return ""
}
