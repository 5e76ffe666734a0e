package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/template"
	"github.com/drowse-vm/drowse/vmm"
)

// launchCreated starts a new VM from the template of its key. Without a usable one it boots, and wants one.
func (s *Host) launchCreated(ctx context.Context, r *state.Record, o CreateOptions) (*Sandbox, error) {
	if o.from != nil {
		return s.launchFrom(ctx, r, *o.from, o)
	}
	if r.Booted = template.Unsuited(r.Spec); r.Booted == "" && (o.Boot || os.Getenv(control.NoTemplateEnv) != "") {
		r.Booted = "a boot was asked for"
	}
	if r.Booted != "" {
		return s.launchNew(ctx, r, "", nil, o.Report)
	}
	key, err := s.templateKey(r.Spec, r.Boot)
	if err != nil {
		return nil, err
	}
	all := s.State.Templates()
	e, err := all.Get(key)
	switch {
	case errors.Is(err, template.ErrNotFound):
		r.Booted = "there was no template for it"
	case err != nil:
		r.Booted = err.Error()
	case !e.Ready() && e.Problem != "":
		r.Booted = "its template could not be made: " + e.Problem
	case !e.Ready():
		r.Booted = "its template was not made yet"
	default:
		b, err := s.launchFrom(ctx, r, e, o)
		if err == nil || ctx.Err() != nil || errors.Is(err, ErrExists) || errors.Is(err, spec.ErrQuota) || errors.Is(err, vmm.ErrHostMemory) {
			return b, err
		}
		if unusable(err) {
			err = errors.Join(err, s.State.RemoveTemplates(context.WithoutCancel(ctx), e))
		}
		r.ID, r.Disk, r.Snapshot, r.Template = spec.NewID(), disk.Stack{}, "", ""
		r.Booted = fmt.Sprintf("template %.12s could not be used: %v", key, err)
	}
	b, err := s.launchNew(ctx, r, "", nil, o.Report)
	if err == nil {
		// A failure costs the next ones a boot, and this one nothing.
		_ = all.Want(key, template.Bare(r.Spec, r.Boot.ImageID, r.Boot.KernelID))
	}
	return b, err
}

// launchFrom starts a new VM from a template.
func (s *Host) launchFrom(ctx context.Context, r *state.Record, e template.Entry, o CreateOptions) (*Sandbox, error) {
	// The lock keeps the snapshot and its layers until the record names them.
	unlock, err := s.State.Share(ctx)
	if err != nil {
		return nil, err
	}
	unlock = sync.OnceValue(unlock)
	defer func() { _ = unlock() }()
	m, err := s.State.Manifest(e.Snapshot)
	if err != nil {
		return nil, err
	}
	s.State.Templates().Use(e.Key)
	r.Disk, r.Snapshot, r.Template = state.SnapshotStack(m), e.Snapshot, e.Snapshot
	*o.Report, err = s.launchNewWith(ctx, r, control.Order{Name: r.Spec.Name, Snapshot: e.Snapshot, NewIdentity: true, Template: true}, unlock)
	if err != nil {
		return nil, err
	}
	return s.Sandbox(r.Spec.Name), nil
}

// templateKey returns the key of a VM.
func (s *Host) templateKey(want Spec, boot state.BootFiles) (string, error) {
	files := []string{s.State.BootPath(boot.Kernel), s.State.BootPath(boot.Initramfs), s.State.BootPath(boot.SystemDisk), s.State.BootPath(boot.Image)}
	if s.launcher.Processes == nil && len(s.launcher.Command) > 0 {
		program, err := exec.LookPath(s.launcher.Command[0])
		if err != nil {
			return "", fmt.Errorf("finding the program of VMs' processes: %w", err)
		}
		files = append(files, program)
	}
	// The addresses that guests have.
	of := struct {
		state.BootFiles
		Ranges []string
	}{boot, []string{os.Getenv(hostnet.RangeEnv), os.Getenv(hostnet.Range6Env)}}
	return template.Key(template.Bare(want, boot.ImageID, boot.KernelID), of, files...)
}

// MakeTemplates makes the templates that VMs of these Specs would be made from, if they do not exist, and returns them.
// Without any, it makes the ones that VMs wanted which have booted. It boots VMs of its own, which are nobody's, run no
// program and are removed; while another process does so, it waits. A wanted template that fails keeps its error, and
// is wanted again after template.RetryAfter.
func (s *Host) MakeTemplates(ctx context.Context, of ...Spec) (made []template.Entry, err error) {
	var errs []error
	for _, want := range of {
		e, err := s.makeFor(ctx, want)
		if err != nil {
			return made, fmt.Errorf("making a template: %w", err)
		}
		made = append(made, e)
	}
	if len(of) > 0 {
		return made, nil
	}
	list, _, err := s.State.Templates().List()
	if err != nil {
		errs = append(errs, err)
	}
	for _, e := range list {
		if ctx.Err() != nil {
			break
		}
		if !e.Due(time.Now()) {
			continue
		}
		switch e, err := s.makeWanted(ctx, e.Key); {
		case err != nil:
			errs = append(errs, fmt.Errorf("making template %.12s: %w", e.Key, err))
		case e.Ready():
			made = append(made, e)
		}
	}
	return made, errors.Join(errs...)
}

// makeFor makes the template that a VM would be made from.
func (s *Host) makeFor(ctx context.Context, want Spec) (e template.Entry, err error) {
	want.Name = template.Hostname
	if want, err = s.State.Complete(want); err != nil {
		return e, err
	}
	if why := template.Unsuited(want); why != "" {
		return e, fmt.Errorf("%w: %s, so it always boots", ErrSpec, why)
	}
	unlock, err := s.State.Templates().Lock(ctx)
	if err != nil {
		return e, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	boot, err := s.resolve(ctx, want)
	if err != nil {
		return e, err
	}
	key, err := s.templateKey(want, boot)
	if err != nil {
		return e, err
	}
	if e, err = s.State.Templates().Get(key); err == nil && e.Ready() && s.State.IsThere(e.Snapshot) {
		return e, nil
	}
	return s.makeTemplate(ctx, template.Entry{Key: key, Spec: template.Bare(want, boot.ImageID, boot.KernelID)})
}

// makeWanted makes a template that is wanted, if it still is.
func (s *Host) makeWanted(ctx context.Context, key string) (e template.Entry, err error) {
	all := s.State.Templates()
	unlock, err := all.Lock(ctx)
	if err != nil {
		return e, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	if e, err = all.Get(key); err != nil || !e.Due(time.Now()) {
		return e, err
	}
	switch now, err := s.keyOf(ctx, e.Spec); {
	case ctx.Err() != nil:
		return e, err
	case err != nil || now != key:
		return template.Entry{Key: key}, all.Remove(key) // nothing boots like this any more
	}
	made, err := s.makeTemplate(ctx, e)
	if err != nil && ctx.Err() == nil {
		e.Problem, e.Tried = err.Error(), time.Now().UTC()
		err = errors.Join(err, all.Put(e))
	}
	return made, err
}

// keyOf returns the key that a VM of a template would have now.
func (s *Host) keyOf(ctx context.Context, bare Spec) (string, error) {
	boot, err := s.resolve(ctx, bare)
	if err != nil {
		return "", err
	}
	return s.templateKey(bare, boot)
}

// makeTemplate boots a VM and, from its sleep, makes a second one, just as a caller's VM is made from a template. The
// sleep of the second becomes the template: it knows which pages a new VM and its first command need. The caller holds
// the lock of templates.
func (s *Host) makeTemplate(ctx context.Context, e template.Entry) (_ template.Entry, err error) {
	if err := s.removeLeft(ctx); err != nil {
		return e, err
	}
	defer func() { err = errors.Join(err, s.removeLeft(context.WithoutCancel(ctx))) }()
	want, name := e.Spec, templateVM+e.Key[:8]
	o := CreateOptions{Boot: true, Metadata: &spec.Metadata{Owner: spec.TemplateOwner, Purpose: "boots for template " + e.Key[:12]}}
	for _, want.Name = range []string{name + "-boot", name} {
		b, err := s.Create(ctx, want, o)
		if err == nil {
			err = b.rehearse(ctx)
		}
		if err != nil {
			return e, err
		}
		// Hooks of the image are for what happens to a user's VM.
		slept, err := b.Sleep(ctx, SleepOptions{Hooks: spec.HooksSkip})
		if err != nil {
			return e, err
		}
		e.Snapshot = slept.Snapshot
		o.Boot, o.from = false, &template.Entry{Key: e.Key, Spec: e.Spec, Snapshot: slept.Snapshot}
	}
	// Its files may have been replaced while it booted.
	r, err := s.State.Get(want.Name)
	if err != nil {
		return e, err
	}
	if now, err := s.templateKey(e.Spec, r.Boot); err != nil || now != e.Key {
		return e, errors.Join(fmt.Errorf("what it boots was replaced meanwhile: make it again"), err)
	}
	all := s.State.Templates()
	e.Created, e.Problem, e.Tried = time.Now().UTC(), "", time.Time{}
	if err := s.State.PutTemplate(ctx, e); err != nil {
		return e, err
	}
	_, err = all.Trim() // the snapshots go with the sweep that follows
	return e, err
}

// rehearsal bounds what rehearse waits for, in the guest's time.
const rehearsal = 10 * time.Second

// rehearse runs a command that does nothing, so that nobody's first command pays for what the guest does once: reading
// the shell and its libraries, and the agent's own preparations. An image without a shell has less to read.
func (b *Sandbox) rehearse(ctx context.Context) error {
	c, err := b.Agent(ctx)
	if err != nil {
		return err
	}
	_, err = c.Exec(ctx, guest.Cmd{Argv: []string{"/bin/sh", "-c", ":"}, Timeout: rehearsal})
	if errors.As(err, new(*guest.ExitError)) {
		err = nil
	}
	return errors.Join(err, c.Close())
}

// templateVM begins the names of VMs that boot for templates.
const templateVM = "template-"

// removeLeft removes VMs that have booted for templates, with what interrupted makers have left. The lock of templates
// must be held.
func (s *Host) removeLeft(ctx context.Context) error {
	dirs, err := filepath.Glob(s.State.VMDir(templateVM + "*"))
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		name := filepath.Base(dir)
		if m, err := s.State.Metadata(name); err != nil || m.Owner != spec.TemplateOwner {
			continue // a user's, or made at this moment
		}
		// It leaves no history.
		_, err := s.State.SetMetadata(ctx, name, func(m *spec.Metadata, _ error) error {
			m.Class = lifetime.Ephemeral
			return nil
		})
		if err == nil || errors.Is(err, ErrNotFound) {
			err = s.Sandbox(name).Delete(ctx, DeleteOptions{Force: true})
		}
		if err != nil && !errors.Is(err, ErrNotFound) {
			return fmt.Errorf("removing a VM that has booted for a template: %w", err)
		}
	}
	return nil
}

// PruneTemplates removes the templates that no VM would be made from any more, such as those of images that were
// removed. It returns what it has removed.
func (s *Host) PruneTemplates(ctx context.Context) (gone []template.Entry, err error) {
	all := s.State.Templates()
	unlock, err := all.Lock(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	if err := s.removeLeft(ctx); err != nil {
		return nil, err
	}
	list, bad, err := all.List()
	if err != nil && len(bad) == 0 {
		return nil, err
	}
	for _, key := range bad {
		gone = append(gone, template.Entry{Key: key, Problem: "its file cannot be read"})
	}
	for _, e := range list {
		now, err := s.keyOf(ctx, e.Spec)
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err != nil || now != e.Key || e.Ready() && !s.State.IsThere(e.Snapshot) {
			gone = append(gone, e)
		}
	}
	return gone, s.State.RemoveTemplates(ctx, gone...)
}
