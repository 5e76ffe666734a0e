package sandbox

import (
	"context"
	"fmt"
	"slices"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// SetSecrets hands secrets to a running VM. When it returns, programs find them as files in guest.SecretsDir.
// Values replace those of the same names. The VM's process keeps them in locked memory, and they are gone with it:
// after a sleep, stop or crash they must be set again. Until then programs that open the files wait, for a minute
// at most. No fork or clone has them. The audit trail records each by its name.
//
// If the VM does not run, SetSecrets returns ErrNotRunning: wake it first. A failure changes nothing except values
// of secrets that existed before.
func (b *Sandbox) SetSecrets(ctx context.Context, list ...spec.Secret) error {
	s, name := b.host, b.name
	for i := range list {
		if err := control.CheckSecret(&list[i]); err != nil {
			return err
		}
	}
	if len(list) == 0 {
		return nil
	}
	r, err := s.State.Get(name)
	if err != nil {
		return err
	}
	if r.Phase != state.Running {
		return fmt.Errorf("%w: %s is %s: secrets are in the memory of a VM's process: wake or start it first", ErrNotRunning, name, r.Phase)
	}
	return s.recordSecrets(ctx, name, audit.KindSecretSet, secretNames(list), func() error {
		return control.Do(ctx, s.State, name, "secrets", list, nil)
	})
}

func secretNames(list []spec.Secret) []string {
	var names []string
	for _, l := range list {
		names = append(names, l.Name)
	}
	return names
}

// RemoveSecrets removes secrets from a VM. A VM that does not run no longer waits for them after its next wake or
// start. For a name that the VM does not have, the error is ErrNotFound.
func (b *Sandbox) RemoveSecrets(ctx context.Context, names ...string) error {
	s, name := b.host, b.name
	return s.recordSecrets(ctx, name, audit.KindSecretRemove, names, func() error {
		_, err := b.change(ctx, "removing secrets of", func() error {
			return control.Do(ctx, s.State, name, "remove-secrets", names, nil)
		}, func(r *state.Record) error { return dropSecrets(r, names) })
		return err
	})
}

// Secrets lists the secrets of a VM. If the VM does not run, they are those that it will wait for.
func (b *Sandbox) Secrets(ctx context.Context) ([]spec.SecretState, error) {
	s, name := b.host, b.name
	r, err := s.State.Get(name)
	if err != nil {
		return nil, err
	}
	var out []spec.SecretState
	if r.Phase == state.Running {
		err = control.Get(ctx, s.State, name, "/secrets", &out)
		return out, err
	}
	for _, f := range r.Secrets {
		out = append(out, spec.SecretState{SecretFile: f, Kept: true})
	}
	return out, nil
}

// recordSecrets calls do and records that in the VM's audit trail, for each secret.
func (s *Host) recordSecrets(ctx context.Context, name string, kind audit.Kind, names []string, do func() error) error {
	if err := s.State.EnsureAudit(name); err != nil {
		return err
	}
	trail := audit.Open(s.State.AuditPath(name))
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

// dropSecrets removes names from the secrets that a VM without a process will wait for.
func dropSecrets(r *state.Record, names []string) error {
	for _, n := range names {
		i := slices.IndexFunc(r.Secrets, func(f spec.SecretFile) bool { return f.Name == n })
		if i < 0 {
			return fmt.Errorf("%w: %s has no secret %q", ErrNotFound, r.Spec.Name, n)
		}
		r.Secrets = slices.Delete(r.Secrets, i, i+1)
	}
	return nil
}

// handIn asks the launcher's owner for the secrets that a VM waits for after its start or wake, and sets them.
func (s *Host) handIn(ctx context.Context, name string) error {
	if s.launcher.Secrets == nil {
		return nil
	}
	r, err := s.State.Load(name)
	if err != nil || len(r.Secrets) == 0 {
		return err
	}
	list, err := s.launcher.Secrets(ctx, name, slices.Clone(r.Secrets))
	if err == nil {
		err = s.Sandbox(name).SetSecrets(ctx, list...)
	}
	if err != nil {
		return fmt.Errorf("handing in the secrets of %s, which runs, and whose programs wait for them: %w", name, err)
	}
	return nil
}
