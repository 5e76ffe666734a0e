package spec

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// E2B is what a client of E2B's wire (package e2b) has said of its sandbox. Only sandboxes with it exist for such
// clients.
type E2B struct {
	// Template is the template as the client named it.
	Template string `json:"template"`
	// Metadata are the client's own words, by which it finds the sandbox.
	Metadata map[string]string `json:"metadata,omitempty"`
	// EnvVars are variables of all commands that are started over the wire.
	EnvVars map[string]string `json:"env_vars,omitempty"`
	// User is who commands run as by default, and Workdir where: those of the template, if it has any.
	User    string `json:"user,omitempty"`
	Workdir string `json:"workdir,omitempty"`
	// Timeout is for how many seconds traffic that resumes the sandbox lets it run: 0 to lifetime.MaxSeconds.
	Timeout int64 `json:"timeout_seconds,omitempty"`
	// Pause says that the sandbox is paused at the end of its time; otherwise it is removed.
	Pause bool `json:"pause,omitempty"`
	// DiskOnly says that this pause keeps the disk, and not what is in memory.
	DiskOnly bool `json:"disk_only,omitempty"`
	// Resume says that traffic resumes the paused sandbox.
	Resume bool `json:"resume,omitempty"`
	// Network is the network that the client asked for.
	Network E2BNetwork `json:"network,omitzero"`
}

// E2BNetwork is the network of a sandbox in the words of E2B's wire. The zero value lets the guest reach the Internet,
// and anyone the guest's ports.
type E2BNetwork struct {
	// AllowOut comes before DenyOut: addresses, prefixes, and in AllowOut names.
	AllowOut []string `json:"allow_out,omitempty"`
	DenyOut  []string `json:"deny_out,omitempty"`
	// NoInternet denies what AllowOut does not allow.
	NoInternet bool `json:"no_internet,omitempty"`
	// Private closes the guest's ports to requests without the sandbox's traffic token.
	Private bool `json:"private,omitempty"`
	// Host replaces the Host of requests to the guest's ports: see Gateway.Host.
	Host string `json:"host,omitempty"`
	// HTTPSPorts are ports of the guest whose servers speak HTTPS.
	HTTPSPorts []uint16 `json:"https_ports,omitempty"`
}

// MaxE2B is the most bytes of an E2B as JSON.
const MaxE2B = 64 << 10

// Clone returns a copy that shares nothing with e.
func (e E2B) Clone() *E2B {
	out := e
	out.Metadata, out.EnvVars = maps.Clone(e.Metadata), maps.Clone(e.EnvVars)
	out.Network.AllowOut, out.Network.DenyOut = slices.Clone(e.Network.AllowOut), slices.Clone(e.Network.DenyOut)
	out.Network.HTTPSPorts = slices.Clone(e.Network.HTTPSPorts)
	return &out
}

func (e *E2B) check() error {
	if e == nil {
		return nil
	}
	text, err := json.Marshal(e)
	switch {
	case err != nil:
		return fmt.Errorf("%w: the words of E2B: %w", ErrMetadata, err)
	case len(text) > MaxE2B:
		return fmt.Errorf("%w: metadata, variables and network of E2B have %d bytes: use at most %d", ErrMetadata, len(text), MaxE2B)
	case e.Timeout < 0 || e.Timeout > lifetime.MaxSeconds:
		return fmt.Errorf("%w: a timeout of %d s: use 0 to %d", ErrMetadata, e.Timeout, int64(lifetime.MaxSeconds))
	}
	return Gateway{Host: e.Network.Host}.check()
}
