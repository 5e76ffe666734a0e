package control

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// CheckSecret returns an error that says what is wrong with a secret.
func CheckSecret(s *spec.Secret) error {
	if err := spec.CheckSecretName(s.Name); err != nil {
		return spec.InField("secret", err)
	}
	if s.From != "" {
		if err := spec.CheckSecretName(s.From); err != nil {
			return spec.InField("from", fmt.Errorf("the source of %s: %w", s.Name, err))
		}
	}
	if s.Mode > 0o777 {
		return spec.InField("mode", fmt.Errorf("%w: %s: mode %#o: use 0 to 0777", spec.ErrSecrets, s.Name, s.Mode))
	}
	if len(s.Value) > spec.MaxSecret {
		return spec.InField("value", fmt.Errorf("%w: %s has %d bytes, at most %d are possible", spec.ErrSecrets, s.Name, len(s.Value), spec.MaxSecret))
	}
	if !s.Proxy {
		return nil
	}
	if s.Mode != 0 || s.UID != 0 || s.GID != 0 {
		return fmt.Errorf("%w: %s is for the proxy: it has no mode and owner", spec.ErrSecrets, s.Name)
	}
	if Referred(s) {
		return nil
	}
	if err := proxy.CheckSecret(oneLine(s.Value)); err != nil {
		return spec.InField("value", fmt.Errorf("%w: %s: %w", spec.ErrSecrets, s.Name, err))
	}
	return nil
}

// Referred reports whether a secret is a reference to its source alone.
func Referred(s *spec.Secret) bool { return s.From != "" && s.Value == nil }

// oneLine returns a value without its line end: files have one, headers cannot.
func oneLine(value []byte) []byte {
	value = bytes.TrimSuffix(value, []byte("\n"))
	return bytes.TrimSuffix(value, []byte("\r"))
}

// ForProxy makes a secret the proxy's if the policy says so or the existing one is. A secret that the guest has
// had as a file cannot become the proxy's, and a secret of the proxy stays the proxy's.
func ForProxy(s *spec.Secret, policy *netpolicy.Policy, there []spec.SecretState) error {
	s.Proxy = s.Proxy || policy.Injects(s.Name)
	if i := slices.IndexFunc(there, func(t spec.SecretState) bool { return t.Name == s.Name }); i >= 0 {
		if s.Proxy && !there[i].Proxy {
			return fmt.Errorf("%w: the guest has %s as a file: take it away first (Sandbox.RemoveSecrets), and let the proxy have a new one, since the guest may have kept that", spec.ErrSecrets, s.Name)
		}
		s.Proxy = there[i].Proxy
	}
	if s.Proxy {
		s.Mode, s.UID, s.GID, s.Value = 0, 0, 0, oneLine(s.Value) // nil stays nil
	}
	return CheckSecret(s)
}

// The rest of the code for secrets is in the VM's process.

// MaxSecretsBody is the most bytes of a request with secrets: values are in base64.
const MaxSecretsBody = spec.MaxSecrets * (spec.MaxSecret*4/3 + 1024)
