package image

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

// Limits of a configuration's settings for commands. The agent takes 4096 variables and 1 MiB of arguments and
// environment.
const (
	maxConfigItems = 1024      // variables, arguments, labels: of each kind
	maxConfigBytes = 256 << 10 // of all of them together
	maxUserBytes   = 256
)

// RunConfig has an image's settings for its commands: the part of an OCI image configuration that a VM can follow.
// Empty fields leave the choice to the caller.
type RunConfig struct {
	// Entrypoint and Cmd are what the image would start. Nothing starts them automatically: a VM has its own init.
	Entrypoint []string `json:"entrypoint"`
	Cmd        []string `json:"cmd"`
	Env        []string `json:"env"`     // KEY=VALUE
	User       string   `json:"user"`    // name or uid, optionally with ":group" or ":gid"
	Workdir    string   `json:"workdir"` // absolute and clean
	// StopSignal, Labels and ExposedPorts (80/tcp, sorted) are kept only for display.
	StopSignal   string            `json:"stop_signal,omitempty"`
	Labels       map[string]string `json:"labels,omitempty"`
	ExposedPorts []string          `json:"exposed_ports,omitempty"`
}

// Argv returns what an image starts, as container runtimes do: its entrypoint with args, or with its own command if
// args is empty. It returns ErrNoEntrypoint if that is nothing.
func (c RunConfig) Argv(args []string) ([]string, error) {
	if len(args) == 0 {
		args = c.Cmd
	}
	argv := slices.Concat(c.Entrypoint, args)
	if len(argv) == 0 {
		return nil, fmt.Errorf("%w: say what to run", ErrNoEntrypoint)
	}
	return argv, nil
}

// empty reports whether no field is set.
func (c RunConfig) empty() bool {
	return len(c.Entrypoint)+len(c.Cmd)+len(c.Env)+len(c.Labels)+len(c.ExposedPorts) == 0 && c.User == "" && c.Workdir == "" && c.StopSignal == ""
}

// Canonical returns the same bytes for the same configuration; nil if it is empty.
func (c RunConfig) Canonical() ([]byte, error) {
	if c.empty() {
		return nil, nil
	}
	return json.Marshal(c) // maps are sorted
}

// Checked returns the clean form of a configuration from outside, or an error that says which limit it exceeds. It
// leaves out variables without a value or a name: no process can have them.
func (c RunConfig) Checked() (RunConfig, error) {
	out := RunConfig{User: c.User, StopSignal: c.StopSignal}
	total := len(c.User) + len(c.Workdir) + len(c.StopSignal)
	count := func(what string, list []string) error {
		if len(list) > maxConfigItems {
			return fmt.Errorf("%w: its configuration has %d %s, at most %d are possible", ErrBadManifest, len(list), what, maxConfigItems)
		}
		for _, s := range list {
			if strings.IndexByte(s, 0) >= 0 {
				return fmt.Errorf("%w: its configuration has a zero byte in %s", ErrBadManifest, what)
			}
			total += len(s) + 1
		}
		return nil
	}
	var labels []string
	for k, v := range c.Labels {
		labels = append(labels, k+"="+v)
	}
	ports := slices.Compact(slices.Sorted(slices.Values(c.ExposedPorts)))
	for _, l := range []struct {
		what string
		list []string
	}{
		{"arguments", c.Entrypoint}, {"arguments", c.Cmd}, {"variables", c.Env}, {"labels", labels}, {"ports", ports},
		{"user, directory or signal", []string{c.User, c.Workdir, c.StopSignal}},
	} {
		if err := count(l.what, l.list); err != nil {
			return RunConfig{}, err
		}
	}
	switch {
	case total > maxConfigBytes:
		return RunConfig{}, fmt.Errorf("%w: its configuration has %d bytes of variables, arguments and labels, at most %d are possible",
			ErrBadManifest, total, maxConfigBytes)
	case len(c.User) > maxUserBytes:
		return RunConfig{}, fmt.Errorf("%w: its configuration names a user of %d bytes", ErrBadManifest, len(c.User))
	}
	out.Entrypoint, out.Cmd = c.Entrypoint, c.Cmd
	for _, kv := range c.Env {
		if key, _, ok := strings.Cut(kv, "="); ok && key != "" {
			out.Env = append(out.Env, kv)
		}
	}
	if len(c.Labels) > 0 {
		out.Labels = c.Labels
	}
	if len(ports) > 0 {
		out.ExposedPorts = ports
	}
	if c.Workdir != "" {
		out.Workdir = path.Clean("/" + c.Workdir)
		if _, err := fstree.SplitPath(out.Workdir); err != nil {
			return RunConfig{}, fmt.Errorf("%w: its working directory: %w", ErrBadManifest, err)
		}
	}
	return out, nil
}
