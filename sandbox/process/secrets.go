package process

import (
	"context"
	"fmt"
	"slices"

	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func (p *process) setSecrets(ctx context.Context, list []spec.Secret) (err error) {
	end, err := p.begin()
	if err != nil {
		return err
	}
	defer end()
	dev := p.in.Machine().Secrets()
	before := dev.List()
	defer func() {
		if err == nil {
			return
		}
		for _, l := range list {
			if !slices.ContainsFunc(before, func(s secrets.State) bool { return s.Name == l.Name }) {
				dev.Remove(l.Name)
			}
		}
	}()
	names := slices.Clone(p.r.Secrets)
	for i := range list {
		l := &list[i]
		if err := control.ForProxy(l, p.r.Spec.Policy, before); err != nil {
			return err
		}
		if err := dev.Set(instance.DeviceSecret(l.SecretFile), l.Value); err != nil {
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
	dev := p.in.Machine().Secrets()
	kept := slices.Clone(p.r.Secrets)
	for _, n := range names {
		if !slices.ContainsFunc(dev.List(), func(s secrets.State) bool { return s.Name == n }) {
			return fmt.Errorf("%w: %s has no secret %q", spec.ErrNotFound, p.r.Spec.Name, n)
		}
		kept = slices.DeleteFunc(kept, func(f spec.SecretFile) bool { return f.Name == n })
	}
	if err := p.awaitSecrets(kept); err != nil {
		return err
	}
	for _, n := range names {
		dev.Remove(n)
	}
	return nil
}

func (p *process) listSecrets() []spec.SecretState {
	p.op.Lock()
	defer p.op.Unlock()
	out := []spec.SecretState{}
	for _, s := range p.in.Machine().Secrets().List() {
		out = append(out, spec.SecretState{
			SecretFile: stateFile(s.Secret), Present: s.Present, Size: s.Size,
			Kept: slices.ContainsFunc(p.r.Secrets, func(f spec.SecretFile) bool { return f.Name == s.Name }),
		})
	}
	return out
}

// stateFile returns the file of a secret. Secrets of the proxy have none.
func stateFile(s secrets.Secret) spec.SecretFile {
	if s.Hidden {
		return spec.SecretFile{Name: s.Name, Proxy: true}
	}
	return spec.SecretFile{Name: s.Name, Mode: s.Mode, UID: s.UID, GID: s.GID}
}
