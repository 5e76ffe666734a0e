package spec

import (
	"fmt"
	"strings"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// SecretsDir is the directory in a guest where programs find its secrets.
const SecretsDir = agentpb.SecretsDir

// Bounds of the secrets of one VM.
const (
	MaxSecrets    = 64
	MaxSecretName = 64
	MaxSecret     = 64 << 10 // bytes of a value
)

// DefaultSecretMode lets every user in the VM read a secret: the VM is the boundary.
const DefaultSecretMode = 0o444

// SecretFile describes a secret in the guest: a file in SecretsDir, unless the secret is one of the proxy's.
type SecretFile struct {
	// Name is 1 to 64 letters, digits, '.', '_' and '-', and does not begin with '.'.
	Name string `json:"name"`
	// Mode is its permissions; 0 is DefaultSecretMode.
	Mode uint16 `json:"mode,omitempty"`
	// UID and GID are the numbers of its owner.
	UID uint32 `json:"uid,omitempty"`
	GID uint32 `json:"gid,omitempty"`
	// Proxy reports that the guest does not get the secret. The VM's proxy puts it into requests, as the network
	// policy says. Secrets that the policy names there are always so, and stay so. Mode, UID and GID are 0 then.
	Proxy bool `json:"proxy,omitempty"`
	// From is the name of the source from which the value comes at each wake and boot; empty means that somebody hands
	// it in. Only the host knows what the source is.
	From string `json:"from,omitempty"`
}

// Secret is a secret with its value. Only the memory of the VM's process has the value.
type Secret struct {
	SecretFile
	// Value is at most MaxSecret bytes. With From, nil means that of the source.
	Value []byte `json:"value"`
	// Transient means that the VM does not wait for it after a wake or boot: its name is forgotten with its value.
	// The VM's record keeps the names of all other secrets.
	Transient bool `json:"transient,omitempty"`
}

// SecretState is what Sandbox.Secrets reports of a secret.
type SecretState struct {
	SecretFile
	// Present reports whether the value is there. If not, programs that open the file wait for it.
	Present bool `json:"present"`
	Size    int  `json:"size"` // bytes
	// Kept reports whether the VM waits for it after a wake or boot.
	Kept bool `json:"kept"`
}

// CheckSecretName returns an error if name cannot be the name of a secret.
func CheckSecretName(name string) error {
	ok := name != "" && len(name) <= MaxSecretName && name[0] != '.'
	for _, c := range []byte(name) {
		ok = ok && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("._-", c) >= 0)
	}
	if !ok {
		return fmt.Errorf("%w: name %q: use 1 to %d letters, digits, '.', '_' and '-', and no '.' at the beginning", ErrSecrets, name, MaxSecretName)
	}
	return nil
}
