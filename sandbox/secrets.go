package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// SetSecrets hands secrets to a running VM. When it returns, programs find them as files in guest.SecretsDir.
// Values replace those of the same names. The VM's process keeps them in locked memory, and they are gone with it:
// after a sleep, stop or crash they must be set again. Until then programs that open the files wait, for a minute
// at most. No fork or clone has them. The audit trail records each by its name.
//
// A secret with a source (From) and a nil Value has the value that Launcher.Secrets returns, now and at each later
// wake and boot. The record keeps the name of the source. A VM that does not run gets it when it does, if all of
// list are such.
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
	later := !slices.ContainsFunc(list, func(l spec.Secret) bool { return !control.Referred(&l) || l.Transient })
	if r.Phase != state.Running && !later {
		return fmt.Errorf("%w: %s is %s: secrets are in the memory of a VM's process: wake or start it first", ErrNotRunning, name, r.Phase)
	}
	values, err := s.resolved(ctx, name, list)
	if err != nil {
		return err
	}
	defer func() {
		for i := range values {
			if control.Referred(&list[i]) {
				clear(values[i].Value)
			}
		}
	}()
	set := func() error {
		now := slices.DeleteFunc(slices.Clone(values), func(l spec.Secret) bool { return control.Referred(&l) })
		if len(now) == 0 {
			return nil
		}
		return control.Do(ctx, s.State, name, "secrets", now, nil)
	}
	return s.recordSecrets(ctx, name, audit.KindSecretSet, secretNames(list), func() error {
		if !later {
			return set()
		}
		_, err := b.change(ctx, "setting secrets of", set, func(r *state.Record) error { return awaitSecrets(r, list) })
		return err
	})
}

// resolved returns secrets with the values of their sources.
func (s *Host) resolved(ctx context.Context, name string, list []spec.Secret) ([]spec.Secret, error) {
	out := slices.Clone(list)
	var want []spec.SecretFile
	for i := range list {
		if control.Referred(&list[i]) {
			want = append(want, list[i].SecretFile)
		}
	}
	if len(want) == 0 {
		return out, nil
	}
	if s.launcher.Secrets == nil {
		return nil, fmt.Errorf("%w: this program knows no sources of secrets: set Launcher.Secrets", spec.ErrSecrets)
	}
	ctx, cancel := context.WithTimeout(ctx, pool.SecretsTime)
	defer cancel()
	got, err := s.launcher.Secrets(ctx, name, slices.Clone(want))
	for i := range out {
		if !control.Referred(&list[i]) || err != nil {
			continue
		}
		j := slices.IndexFunc(got, func(g spec.Secret) bool { return g.Name == list[i].Name })
		if j < 0 {
			err = fmt.Errorf("%w: source %s has no value for %s", spec.ErrSecrets, list[i].From, list[i].Name)
			break
		}
		out[i].Value = got[j].Value
	}
	if err != nil {
		for _, g := range got {
			clear(g.Value)
		}
		return nil, err
	}
	return out, nil
}

// awaitSecrets makes a VM without a process wait for secrets that have sources.
func awaitSecrets(r *state.Record, list []spec.Secret) error {
	there := make([]spec.SecretState, len(r.Secrets))
	for i, f := range r.Secrets {
		there[i].SecretFile = f
	}
	kept := slices.Clone(r.Secrets)
	for _, l := range list {
		if err := control.ForProxy(&l, r.Spec.Policy, there); err != nil {
			return err
		}
		kept = append(slices.DeleteFunc(kept, func(f spec.SecretFile) bool { return f.Name == l.Name }), l.SecretFile)
	}
	if len(kept) > spec.MaxSecrets {
		return fmt.Errorf("%w: a VM has %d at most: take some away (Sandbox.RemoveSecrets)", spec.ErrSecrets, spec.MaxSecrets)
	}
	r.Secrets = kept
	return nil
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

// Secrets lists the secrets of a VM, in the order of their names. If the VM does not run, they are those that it will
// wait for.
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
	slices.SortFunc(out, func(a, b spec.SecretState) int { return strings.Compare(a.Name, b.Name) })
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

// handIn asks the launcher's owner for the secrets that a VM waits for after its start or wake, and sets them. The VM
// is not held up by one that has no value: its programs wait for that secret, and others do not need it. So a failure
// is an event, and stands in the report. If the caller goes away, others may already use the VM, so handIn goes on.
func (s *Host) handIn(ctx context.Context, rep *control.Report) {
	if s.launcher.Secrets == nil || len(rep.Awaited) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pool.SecretsTime)
	defer cancel()
	list, err := s.launcher.Secrets(ctx, rep.Name, slices.Clone(rep.Awaited))
	defer func() {
		for _, l := range list {
			clear(l.Value)
		}
	}()
	// The guest serves its secrets before the first of them has a value, so that programs find the file and wait.
	for _, f := range rep.Awaited {
		if err != nil && f.From != "" && !slices.ContainsFunc(list, func(l spec.Secret) bool { return l.Name == f.Name }) {
			list = append(list, spec.Secret{SecretFile: f})
		}
	}
	set := func(list ...spec.Secret) error {
		return s.recordSecrets(ctx, rep.Name, audit.KindSecretSet, valued(list), func() error {
			return control.Do(ctx, s.State, rep.Name, "secrets", list, nil)
		})
	}
	if len(list) > 0 && set(list...) != nil {
		// One that the VM cannot have must not keep back the others.
		for _, l := range list {
			err = errors.Join(err, set(l))
		}
	}
	if err == nil {
		return
	}
	rep.SecretsProblem = err.Error()
	slog.Warn("secrets have no value, and programs wait for them", "sandbox", rep.Name, "error", err)
	if r, lerr := s.State.Load(rep.Name); lerr == nil {
		e := s.State.Event(ctx, r, events.SecretsFailed)
		e.Details.Problem = rep.SecretsProblem
		s.State.Tell(e)
	}
}

// valued returns the names of the secrets that have values.
func valued(list []spec.Secret) (names []string) {
	for _, l := range list {
		if !control.Referred(&l) {
			names = append(names, l.Name)
		}
	}
	return names
}
