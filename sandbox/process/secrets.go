package process

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// awaitHidden makes the proxy wait for its secrets.
func (p *process) awaitHidden() error {
	for _, f := range p.r.Secrets {
		if !f.Proxy {
			continue
		}
		if err := p.hidden.Await(instance.DeviceSecret(f)); err != nil {
			return fmt.Errorf("%w: %w", spec.ErrSecrets, err)
		}
	}
	return nil
}

// secretsOf returns the store of the proxy's secrets, or of the guest's.
func (p *process) secretsOf(proxy bool) Secrets {
	if proxy {
		return &p.hidden
	}
	return p.in.Secrets()
}

func (p *process) setSecrets(ctx context.Context, list []spec.Secret) (err error) {
	end, err := p.begin()
	if err != nil {
		return err
	}
	defer end()
	before := p.secretStates()
	known := map[string]bool{}
	for _, s := range before {
		known[s.Name] = true
	}
	var added []spec.SecretFile
	defer func() {
		if err == nil {
			return
		}
		for _, f := range added {
			p.secretsOf(f.Proxy).Remove(f.Name)
		}
	}()
	names := slices.Clone(p.r.Secrets)
	for i := range list {
		l := &list[i]
		if err := control.ForProxy(l, p.r.Spec.Policy, before); err != nil {
			return err
		}
		if !known[l.Name] {
			if control.Referred(l) {
				return fmt.Errorf("%w: %s has no value", spec.ErrSecrets, l.Name)
			}
			if len(known) >= spec.MaxSecrets {
				return fmt.Errorf("%w: a VM has %d at most: take some away (Sandbox.RemoveSecrets)", spec.ErrSecrets,
					spec.MaxSecrets)
			}
			known[l.Name] = true
			added = append(added, l.SecretFile)
		}
		if control.Referred(l) {
			continue // it has no value yet, and the VM waits for it since its start
		}
		if err := p.secretsOf(l.Proxy).Set(instance.DeviceSecret(l.SecretFile), l.Value); err != nil {
			return fmt.Errorf("%w: %w", spec.ErrSecrets, err)
		}
		names = slices.DeleteFunc(names, func(f spec.SecretFile) bool { return f.Name == l.Name })
		if !l.Transient {
			names = append(names, l.SecretFile)
		}
	}
	if slices.ContainsFunc(list, func(l spec.Secret) bool { return !l.Proxy }) {
		if err := p.in.ServeSecrets(ctx); err != nil {
			return err
		}
	}
	return p.awaitSecrets(names)
}

// awaitSecrets makes the VM wait for these secrets after a wake or a boot.
func (p *process) awaitSecrets(names []spec.SecretFile) error {
	if slices.Equal(p.r.Secrets, names) {
		return nil
	}
	return p.save(func() error { p.r.Secrets = names; return nil })
}

func (p *process) removeSecrets(names []string) error {
	end, err := p.begin()
	if err != nil {
		return err
	}
	defer end()
	there := p.secretStates()
	var gone []spec.SecretState
	kept := slices.Clone(p.r.Secrets)
	for _, n := range names {
		i := slices.IndexFunc(there, func(s spec.SecretState) bool { return s.Name == n })
		if i < 0 {
			return fmt.Errorf("%w: %s has no secret %q", spec.ErrNotFound, p.r.Spec.Name, n)
		}
		gone = append(gone, there[i])
		kept = slices.DeleteFunc(kept, func(f spec.SecretFile) bool { return f.Name == n })
	}
	if err := p.awaitSecrets(kept); err != nil {
		return err
	}
	for _, s := range gone {
		p.secretsOf(s.Proxy).Remove(s.Name)
	}
	return nil
}

func (p *process) listSecrets() []spec.SecretState {
	p.op.Lock()
	defer p.op.Unlock()
	return p.secretStates()
}

// secretStates returns all secrets in the order of their names. p.op must be held.
func (p *process) secretStates() []spec.SecretState {
	out := []spec.SecretState{}
	for _, proxy := range []bool{false, true} {
		for _, s := range p.secretsOf(proxy).List() {
			f := spec.SecretFile{Name: s.Name, Proxy: true}
			if !proxy {
				f = spec.SecretFile{Name: s.Name, Mode: s.Mode, UID: s.UID, GID: s.GID}
			}
			i := slices.IndexFunc(p.r.Secrets, func(f spec.SecretFile) bool { return f.Name == s.Name })
			if i >= 0 {
				f.From = p.r.Secrets[i].From
			}
			out = append(out, spec.SecretState{SecretFile: f, Present: s.Present, Size: s.Size, Kept: i >= 0})
		}
	}
	slices.SortFunc(out, func(a, b spec.SecretState) int { return strings.Compare(a.Name, b.Name) })
	return out
}
