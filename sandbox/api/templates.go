package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/template"
)

// templateTime is how long the boot for a template may take.
const templateTime = writeTime

// templateRoutes returns the routes of templates, which sandboxes of all owners share.
func templateRoutes() []route {
	const all, one = "/v1/templates", "/v1/templates/{template}"
	return []route{
		{method: http.MethodGet, path: all, scope: ScopeRead, allOwners: true, op: "list templates", says: "List templates, and those that sandboxes have asked for.", gives: wire.Templates{}, serve: func(s *Server, _ *request) (int, any, error) {
			list, bad, err := s.o.Host.State.Templates().List()
			out := wire.Templates{Templates: []wire.Template{}, Problems: bad}
			for _, e := range list {
				out.Templates = append(out.Templates, s.template(e))
			}
			return ok(out, err)
		}},
		{method: http.MethodPost, path: all, scope: ScopeAdmin, op: "make template", says: "Boot a sandbox and keep it as the template of its image and size, as an operation. One that is there already is kept.", takes: wire.TemplateSpec{}, needsBody: true, gives: wire.Operation{}, accepted: true, idempotent: true, serve: makeTemplate},
		{method: http.MethodGet, path: one, scope: ScopeRead, allOwners: true, op: "get template", says: "Say what is known of a template.", gives: wire.Template{}, serve: func(s *Server, r *request) (int, any, error) {
			e, err := s.findTemplate(r)
			if err != nil {
				return 0, nil, err
			}
			return ok(s.template(e), nil)
		}},
		{method: http.MethodDelete, path: one, scope: ScopeAdmin, op: "remove template", says: "Remove a template. Sandboxes that were made from it stay.", gives: wire.Empty{}, serve: func(s *Server, r *request) (int, any, error) {
			e, err := s.findTemplate(r)
			if err == nil {
				err = s.o.Host.State.RemoveTemplates(r.Context(), e)
			}
			return ok(wire.Empty{}, err)
		}},
	}
}

func (s *Server) findTemplate(r *request) (template.Entry, error) {
	e, err := s.o.Host.State.Templates().Find(r.PathValue("template"))
	if errors.Is(err, template.ErrNotFound) {
		err = own("not-found", "list what there is, with GET /v1/templates", "%w", err)
	}
	return e, err
}

func (s *Server) template(e template.Entry) wire.Template {
	v := e.Spec
	t := wire.Template{
		Key: e.Key, Snapshot: e.Snapshot, Problem: e.Problem, State: "wanted", Used: e.Used,
		TemplateSpec: wire.TemplateSpec{Image: v.Image, Kernel: v.Kernel, VCPUs: v.VCPUs, MemoryMiB: v.MemoryMiB, DiskMiB: v.DiskMiB, Network: v.Network, IPv6: v.IPv6, Cmdline: v.Cmdline, NoACPI: v.NoACPI},
	}
	switch {
	case e.Ready():
		t.State, t.Created = "ready", &e.Created
		t.Stored, _ = state.DiskUsage(s.o.Host.State.SnapshotDir(e.Snapshot)) // 0 if it was removed just now
	case e.Problem != "":
		t.State = "failed"
	}
	return t
}

func makeTemplate(s *Server, r *request) (int, any, error) {
	want := r.body.(*wire.TemplateSpec)
	if err := mayBoot(r, want.Kernel); err != nil {
		return 0, nil, err
	}
	if want.Image == "" {
		return 0, nil, spec.InField("image", fmt.Errorf("%w: there is no image", sandbox.ErrSpec))
	}
	op, err := s.begin(r, "make template", func(ctx context.Context, progress func(string, int64, int64)) (out wire.Operation, err error) {
		ctx, cancel := context.WithTimeoutCause(ctx, templateTime, fmt.Errorf("it has not booted within %v", time.Duration(templateTime)))
		defer cancel()
		progress("boot", 0, 0)
		made, err := s.o.Host.MakeTemplates(ctx, want.VM())
		if err == nil && len(made) == 1 {
			out.Template = made[0].Key
		}
		return out, err
	})
	return http.StatusAccepted, op, err
}
