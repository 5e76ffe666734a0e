package spec

import (
	"fmt"
	"strings"
)

// Bounds of the secrets of one VM.
const (
	MaxSecrets    = 64
	MaxSecretName = 64
	MaxSecret     = 64 << 10 // bytes of a value
)

// DefaultSecretMode is for everybody in the VM: the VM is what separates.
const DefaultSecretMode = 0o444

// SecretFile says what a secret looks like in the guest: a file in guest.SecretsDir, if it is not one of the proxy's.
type SecretFile struct {
	// Name is 1 to 64 letters, digits, '.', '_' and '-', and does not begin with '.'.
	Name string `json:"name"`
	// Mode has its permissions; 0 is DefaultSecretMode.
	Mode uint16 `json:"mode,omitempty"`
	// UID and GID are its owner, in numbers.
	UID uint32 `json:"uid,omitempty"`
	GID uint32 `json:"gid,omitempty"`
	// Proxy says that the guest does not get it: it is for the VM's proxy, which puts it into requests as the network
	// policy says. Secrets that the policy names there are so in any case, and stay so. Mode, UID and GID are 0 then.
	Proxy bool `json:"proxy,omitempty"`
}

// Secret is a secret with its value, which is in memory of the VM's process only.
type Secret struct {
	SecretFile
	// Value is at most MaxSecret bytes.
	Value []byte `json:"value"`
	// Transient says that the VM is not to wait for it after a wake or boot: its name is
	// forgotten with its value. The name of any other is kept in the VM's record.
	Transient bool `json:"transient,omitempty"`
}

// SecretState is what Sandbox.Secrets says of a secret.
type SecretState struct {
	SecretFile
	// Present says that the value is there; else programs that open the file wait for it.
	Present bool `json:"present"`
	Size    int  `json:"size"` // bytes
	// Kept says that the VM waits for it after a wake or boot.
	Kept bool `json:"kept"`
}

// CheckSecretName says whether a secret can be called so.
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
