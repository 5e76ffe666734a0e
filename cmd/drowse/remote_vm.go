package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// farVM is a VM of a server.
type farVM struct {
	r *farHost
	*client.Sandbox
}

func (r *farHost) vm(name string) handle { return farVM{r, r.Sandbox(name)} }

func (r *farHost) awake(ctx context.Context, name string) error {
	b, err := r.Get(ctx, name)
	if err != nil || b.Status.Live() {
		return err
	}
	if b.Status != records.Asleep {
		return fmt.Errorf("%w: %s is %s: %s", spec.ErrNotRunning, name, b.Status, b.Problem)
	}
	_, err = r.Wake(ctx, name)
	return err
}

// WaitService goes on when the server's time for one request is over.
func (v farVM) WaitService(ctx context.Context, service string) (records.Service, error) {
	for {
		st, err := v.Sandbox.WaitService(ctx, service)
		if err == nil || ctx.Err() != nil {
			return st, err
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			return v.known(ctx, service), err
		}
		if wait.For(ctx, operationPoll) != nil {
			return st, ctx.Err()
		}
	}
}

// known returns what the server says of a service, if it does.
func (v farVM) known(ctx context.Context, service string) records.Service {
	list, _ := v.Services(ctx) // for an error that there is already
	for _, st := range list {
		if st.Name == service {
			return st
		}
	}
	return records.Service{}
}

func (v farVM) SetSecrets(ctx context.Context, list ...spec.Secret) error {
	for _, s := range list {
		if err := v.SetSecret(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

func (v farVM) RemoveSecrets(ctx context.Context, names ...string) error {
	for _, n := range names {
		if err := v.RemoveSecret(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

func (v farVM) flows(ctx context.Context, follow bool, f func(netpolicy.FlowRecord) error) error {
	if follow {
		return v.FollowFlows(ctx, f)
	}
	list, err := v.r.Flows(ctx, v.Name())
	if err != nil {
		return err
	}
	if list.Truncated {
		fmt.Fprintf(v.r.a.stderr, "drowse: these are the newest %d flows\n", len(list.Flows))
	}
	for _, r := range list.Flows {
		if err := f(r); err != nil {
			return err
		}
	}
	return nil
}

func (v farVM) audit(ctx context.Context, o auditOptions, f func(audit.Entry) error) (is audit.Trailer, err error) {
	size := 0
	err = v.Audit(ctx, client.AuditOptions{Since: o.since, Follow: o.follow, Trailer: true}, func(text json.RawMessage) error {
		if size += len(text); size > maxListBytes && !o.follow {
			return fmt.Errorf("the server %s sends a trail of more than %d MiB: use --since", v.r.server, maxListBytes>>20)
		}
		var l struct {
			Trailer *audit.Trailer `json:"trailer"`
			audit.Entry
		}
		if err := json.Unmarshal(text, &l); err != nil {
			return fmt.Errorf("reading the server's answer: %w", err)
		}
		if l.Trailer != nil {
			is = *l.Trailer
			return nil
		}
		return f(l.Entry)
	})
	return is, err
}

func (v farVM) watch(ctx context.Context, o watchOptions, f func(wire.FileEvent) error) error {
	return v.Files().Watch(ctx, o.paths, client.WatchOptions{Recursive: o.recursive, KeepAwake: o.use}, func(e wire.FileEvent) error {
		if e.Event == "ready" {
			o.ready()
			return nil
		}
		return f(e)
	})
}

func farVolume(v wire.Volume, err error) (volumeDoc, error) {
	return volumeDoc{Version: 1, ID: v.ID, Name: v.Name, Size: v.SizeBytes, Created: v.Created, Generation: v.Generation, Settled: v.Settled}, err
}

func farVolumeInfo(v wire.Volume, err error) (volumeInfo, error) {
	d, err := farVolume(v, err)
	return volumeInfo{d, v.Allocated, some(v.Users)}, err
}

func (r *farHost) volumes(ctx context.Context) (out []volumeInfo, err error) {
	list, err := r.Volumes(ctx)
	for _, v := range list {
		i, _ := farVolumeInfo(v, nil)
		out = append(out, i)
	}
	return out, err
}

func (r *farHost) volume(ctx context.Context, name string) (volumeInfo, error) {
	return farVolumeInfo(r.Volume(ctx, name))
}

func (r *farHost) createVolume(ctx context.Context, name string, mib int64) (volumeDoc, error) {
	return farVolume(r.CreateVolume(ctx, wire.MakeVolume{Name: name, SizeMiB: mib}))
}

func (r *farHost) resizeVolume(ctx context.Context, name string, mib int64) (volumeDoc, error) {
	return farVolume(r.ResizeVolume(ctx, name, mib))
}

func (r *farHost) templates(ctx context.Context) (out []templateInfo, err error) {
	list, err := r.Templates(ctx)
	for _, t := range list {
		i := templateInfo{templateDoc{Version: 1, Key: t.Key, Spec: t.VM(), Snapshot: t.Snapshot, Problem: t.Problem}, t.Used, t.Stored}
		if t.Created != nil {
			i.Created = *t.Created
		}
		out = append(out, i)
	}
	return out, err
}

func (r *farHost) makeTemplate(ctx context.Context, of *wire.TemplateSpec) (out []templateDoc, err error) {
	var wanted []wire.Template
	if of != nil {
		wanted = append(wanted, wire.Template{TemplateSpec: *of, State: "wanted"})
	} else if wanted, err = r.Templates(ctx); err != nil {
		return nil, err
	}
	keys := map[string]bool{}
	var errs []error
	for _, t := range wanted {
		if t.State != "wanted" {
			continue
		}
		o, err := r.MakeTemplate(ctx, t.TemplateSpec)
		if err == nil {
			o, err = r.await(ctx, o, nil)
		}
		var e *records.Error
		if t.Key != "" && errors.As(err, &e) && (e.Code == "image-not-found" || e.Code == "kernel-not-found") {
			err = r.RemoveTemplate(ctx, t.Key) // no VM starts like this any more
		}
		if ctx.Err() != nil {
			return nil, err
		}
		errs, keys[o.Template] = append(errs, err), true
	}
	list, err := r.templates(ctx)
	for _, t := range list {
		if keys[t.Key] {
			out = append(out, t.templateDoc)
		}
	}
	return out, errors.Join(append(errs, err)...)
}

func (r *farHost) removeTemplate(ctx context.Context, word string) (key string, err error) {
	t, err := r.Template(ctx, word)
	if err != nil {
		return "", err
	}
	return t.Key, r.RemoveTemplate(ctx, t.Key)
}

// await waits for the end of an operation, and cancels it if the context ends. p may be nil.
func (r *farHost) await(ctx context.Context, o wire.Operation, p *progress) (wire.Operation, error) {
	for o.State == "running" {
		if p != nil && o.Stage != "" {
			p.report(o.Stage, o.Done, o.Total)
		}
		if wait.For(ctx, operationPoll) != nil {
			late, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			_, _ = r.CancelOperation(late, o.ID)
			cancel()
			return o, ctx.Err()
		}
		var err error
		if o, err = r.Operation(ctx, o.ID); err != nil {
			return o, err
		}
	}
	switch {
	case o.Error != nil:
		return o, o.Error.Err()
	case o.State != "done":
		return o, fmt.Errorf("the server has ended it: %.64s", o.State)
	}
	return o, nil
}

// inspectSnapshot returns less than a host does: a server does not say what its files are.
func (r *farHost) inspectSnapshot(ctx context.Context, id string) (any, error) {
	return r.SnapshotInfo(ctx, id)
}

func (r *farHost) exportSnapshot(ctx context.Context, id string, w io.Writer) error {
	_, err := r.ExportSnapshot(ctx, id, w)
	return err
}

func (r *farHost) importSnapshot(ctx context.Context, in io.Reader, _ bool) (wire.Imported, error) {
	return r.ImportSnapshot(ctx, in)
}

func (r *farHost) image(ctx context.Context, ref string) (json.RawMessage, error) {
	return r.ImageRecord(ctx, ref)
}

func (r *farHost) exportImage(ctx context.Context, ref, format string, w io.Writer, moved func(done, total int64)) (id string, err error) {
	text, err := r.ImageRecord(ctx, ref)
	if err != nil {
		return "", err
	}
	var i wire.Image
	if err := json.Unmarshal(text, &i); err != nil {
		return "", fmt.Errorf("reading the server's answer: %w", err)
	}
	_, err = r.ExportImage(ctx, i.ID, format, &counting{Writer: w, moved: func(n int64) { moved(n, max(n, i.Size)) }})
	return i.ID, err
}
