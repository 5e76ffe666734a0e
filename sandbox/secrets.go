package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// checkSecret says what is wrong with a secret.
func checkSecret(s *spec.Secret) error {
	if err := spec.CheckSecretName(s.Name); err != nil {
		return err
	}
	if s.Mode > 0o777 {
		return fmt.Errorf("%w: %s: mode %#o: use 0 to 0777", ErrSecrets, s.Name, s.Mode)
	}
	if len(s.Value) > spec.MaxSecret {
		return fmt.Errorf("%w: %s has %d bytes, at most %d are possible", ErrSecrets, s.Name, len(s.Value), spec.MaxSecret)
	}
	if !s.Proxy {
		return nil
	}
	if s.Mode != 0 || s.UID != 0 || s.GID != 0 {
		return fmt.Errorf("%w: %s is for the proxy: it has no mode and owner", ErrSecrets, s.Name)
	}
	if err := proxy.CheckSecret(oneLine(s.Value)); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrSecrets, s.Name, err)
	}
	return nil
}

// oneLine is a value without the end of a line, which files have and headers cannot.
func oneLine(value []byte) []byte {
	value = bytes.TrimSuffix(value, []byte("\n"))
	return bytes.TrimSuffix(value, []byte("\r"))
}

// forProxy makes a secret the proxy's if the policy says so or it is so already. One that the guest has had is
// none for the proxy, and the reverse.
func forProxy(s *spec.Secret, policy *netpolicy.Policy, there []secrets.State) error {
	s.Proxy = s.Proxy || policy.Injects(s.Name)
	if i := slices.IndexFunc(there, func(t secrets.State) bool { return t.Name == s.Name }); i >= 0 {
		if s.Proxy && !there[i].Hidden {
			return fmt.Errorf("%w: the guest has %s as a file: take it away first (`drowse secret rm`), and let the proxy have a new one, since the guest may have kept that", ErrSecrets, s.Name)
		}
		s.Proxy = there[i].Hidden
	}
	if s.Proxy {
		s.Mode, s.UID, s.GID, s.Value = 0, 0, 0, oneLine(s.Value)
	}
	return checkSecret(s)
}

// SetSecrets hands secrets to a running VM, whose programs find them as files in
// guest.SecretsDir when it returns. Values replace those of the same names. They are kept in
// locked memory of the VM's process, and are gone with it: after a sleep, stop or crash they
// must be handed in again, until when programs that open the files wait, for a minute at
// most. No fork or clone has them. Each is recorded in the audit trail by its name.
//
// A VM that does not run is ErrNotRunning: wake it first. If it fails, nothing has changed
// but values of secrets that were there before.
func (s *Store) SetSecrets(ctx context.Context, name string, list ...spec.Secret) error {
	for i := range list {
		if err := checkSecret(&list[i]); err != nil {
			return err
		}
	}
	if len(list) == 0 {
		return nil
	}
	r, err := s.Get(name)
	if err != nil {
		return err
	}
	if r.Phase != state.Running {
		return fmt.Errorf("%w: %s is %s: secrets are in the memory of a VM's process: wake or start it first", ErrNotRunning, name, r.Phase)
	}
	body, err := json.Marshal(list)
	if err != nil {
		return err
	}
	defer clear(body)
	return s.recordSecrets(ctx, name, audit.KindSecretSet, secretNames(list), func() error {
		return s.callWith(ctx, name, http.MethodPut, "/secrets", body, discard)
	})
}

func secretNames(list []spec.Secret) []string {
	var names []string
	for _, l := range list {
		names = append(names, l.Name)
	}
	return names
}

// RemoveSecrets takes secrets away from a VM, which need not run: then it does not wait for
// them any more when it is brought back. A name that it does not have is ErrNotFound.
func (s *Store) RemoveSecrets(ctx context.Context, name string, names ...string) error {
	return s.recordSecrets(ctx, name, audit.KindSecretRemove, names, func() error {
		for {
			r, err := s.Get(name)
			if err != nil {
				return err
			}
			if r.Phase == state.Running {
				err = s.callWith(ctx, name, http.MethodDelete, "/secrets?"+url.Values{"name": names}.Encode(), nil, discard)
			} else {
				err = s.dropSecrets(name, names)
			}
			if !passing(err) {
				return err
			}
			select {
			case <-ctx.Done():
				return errors.Join(fmt.Errorf("removing secrets of %s: %w", name, ctx.Err()), err)
			case <-time.After(5 * time.Millisecond):
			}
		}
	})
}

// Secrets lists the secrets of a VM. Of one that does not run, they are those that it
// will wait for.
func (s *Store) Secrets(ctx context.Context, name string) ([]spec.SecretState, error) {
	r, err := s.Get(name)
	if err != nil {
		return nil, err
	}
	var out []spec.SecretState
	if r.Phase == state.Running {
		err = s.call(ctx, name, http.MethodGet, "/secrets", &out)
		return out, err
	}
	for _, f := range r.Secrets {
		out = append(out, spec.SecretState{SecretFile: f, Kept: true})
	}
	return out, nil
}

func discard(io.Reader) error { return nil }

// recordSecrets does something with secrets and notes it in the VM's audit trail.
func (s *Store) recordSecrets(ctx context.Context, name string, kind audit.Kind, names []string, do func() error) error {
	if err := s.EnsureAudit(name); err != nil {
		return err
	}
	trail := audit.Open(s.AuditPath(name))
	var pending []*audit.Pending
	for _, n := range names {
		p, err := trail.Begin(ctx, audit.Action{Kind: kind, Path: guest.SecretsDir + "/" + n})
		if err != nil {
			return err
		}
		pending = append(pending, p)
	}
	err := do()
	for _, p := range pending {
		o := audit.Outcome{}
		if err != nil {
			o.Error = err.Error()
		}
		p.End(o)
	}
	return err
}

// dropSecrets makes a VM without a process wait for fewer secrets.
func (s *Store) dropSecrets(name string, names []string) error {
	l, err := s.Lock(name)
	if err != nil {
		return err
	}
	defer l.Release()
	r, err := s.Load(name)
	if err != nil {
		return err
	}
	for _, n := range names {
		i := slices.IndexFunc(r.Secrets, func(f spec.SecretFile) bool { return f.Name == n })
		if i < 0 {
			return fmt.Errorf("%w: %s has no secret %q", ErrNotFound, name, n)
		}
		r.Secrets = slices.Delete(r.Secrets, i, i+1)
	}
	return s.Save(r)
}

// handIn asks the launcher's owner for the secrets that a VM waits for which has just been
// brought back.
func (s *Store) handIn(ctx context.Context, l Launcher, name string) error {
	if l.Secrets == nil {
		return nil
	}
	r, err := s.Load(name)
	if err != nil || len(r.Secrets) == 0 {
		return err
	}
	list, err := l.Secrets(ctx, name, slices.Clone(r.Secrets))
	if err == nil {
		err = s.SetSecrets(ctx, name, list...)
	}
	if err != nil {
		return fmt.Errorf("handing in the secrets of %s, which runs, and whose programs wait for them: %w", name, err)
	}
	return nil
}

// The rest is in the VM's process.

// maxSecretsBody bounds a request with secrets, in bytes: values are in base64.
const maxSecretsBody = spec.MaxSecrets * (spec.MaxSecret*4/3 + 1024)

func (p *process) handleSecrets(handle func(string, func(*http.Request) (any, error), func())) {
	handle("PUT /secrets", func(r *http.Request) (any, error) {
		var list []spec.Secret
		d := json.NewDecoder(io.LimitReader(r.Body, maxSecretsBody))
		d.DisallowUnknownFields()
		if err := d.Decode(&list); err != nil {
			return nil, fmt.Errorf("reading secrets: %w: %w", ErrSecrets, err)
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
		if err := forProxy(l, p.r.Spec.Policy, before); err != nil {
			return err
		}
		if err := dev.Set(instance.DeviceSecret(l.SecretFile), l.Value); err != nil {
			return fmt.Errorf("%w: %w", ErrSecrets, err)
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
			return fmt.Errorf("%w: %s has no secret %q", ErrNotFound, p.r.Spec.Name, n)
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
