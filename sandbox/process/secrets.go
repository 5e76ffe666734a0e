package process

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"

	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func (p *process) handleSecrets(handle func(string, func(*http.Request) (any, error), func())) {
	handle("PUT /secrets", func(r *http.Request) (any, error) {
		var list []spec.Secret
		d := json.NewDecoder(io.LimitReader(r.Body, control.MaxSecretsBody))
		d.DisallowUnknownFields()
		if err := d.Decode(&list); err != nil {
			return nil, fmt.Errorf("reading secrets: %w: %w", spec.ErrSecrets, err)
		}
		defer func() {
			for _, l := range list {
				clear(l.Value)
			}
		}()
		return struct{}{}, p.setSecrets(context.WithoutCancel(r.Context()), list)
	}, nil)
	handle("DELETE /secrets", func(r *http.Request) (any, error) {
		return struct{}{}, p.removeSecrets(r.URL.Query()["name"])
	}, nil)
	handle("GET /secrets", func(*http.Request) (any, error) { return p.listSecrets(), nil }, nil)
}

func (p *process) setSecrets(ctx context.Context, list []spec.Secret) (err error) {
	p.op.Lock()
	defer p.op.Unlock()
	if err := p.alive(); err != nil {
		return err
	}
	defer p.in.KeepRunning()()
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
	old := p.r.Secrets
	if slices.Equal(old, names) {
		return nil
	}
	p.r.Secrets = names
	if err := p.store.Save(p.r); err != nil {
		p.r.Secrets = old
		return err
	}
	return nil
}

func (p *process) removeSecrets(names []string) error {
	p.op.Lock()
	defer p.op.Unlock()
	if err := p.alive(); err != nil {
		return err
	}
	dev := p.in.Machine().Secrets()
	old, kept := p.r.Secrets, slices.Clone(p.r.Secrets)
	for _, n := range names {
		if !slices.ContainsFunc(dev.List(), func(s secrets.State) bool { return s.Name == n }) {
			return fmt.Errorf("%w: %s has no secret %q", spec.ErrNotFound, p.r.Spec.Name, n)
		}
		kept = slices.DeleteFunc(kept, func(f spec.SecretFile) bool { return f.Name == n })
	}
	if !slices.Equal(old, kept) {
		p.r.Secrets = kept
		if err := p.store.Save(p.r); err != nil {
			p.r.Secrets = old
			return err
		}
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

// stateFile is what a secret looks like. Those of the proxy have no file.
func stateFile(s secrets.Secret) spec.SecretFile {
	if s.Hidden {
		return spec.SecretFile{Name: s.Name, Proxy: true}
	}
	return spec.SecretFile{Name: s.Name, Mode: s.Mode, UID: s.UID, GID: s.GID}
}
