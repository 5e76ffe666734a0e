package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/builder"
	"github.com/drowse-vm/drowse/rootfs/image/oci"
	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// resourceRoutes returns the routes of what belongs to a sandbox.
func resourceRoutes() []route {
	get, put, post, del := http.MethodGet, http.MethodPut, http.MethodPost, http.MethodDelete
	const secrets, services = onOne + "/secrets", onOne + "/services"
	// service returns a route that does something with a service of a running sandbox.
	service := func(verb, says string, do func(*sandbox.Sandbox, context.Context, string) (records.Service, error)) route {
		return route{
			method: post, path: services + "/{service}/" + verb, scope: ScopeCreate, op: verb + " service", says: says, takes: wire.Empty{}, gives: records.Service{},
			serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, r *request) (records.Service, error) {
				return do(b, ctx, r.PathValue("service"))
			}),
		}
	}
	start := func(again bool) func(*sandbox.Sandbox, context.Context, string) (records.Service, error) {
		return func(b *sandbox.Sandbox, ctx context.Context, name string) (records.Service, error) {
			return b.StartService(ctx, name, again)
		}
	}
	return []route{
		{method: get, path: secrets, scope: ScopeRead, op: "list secrets", says: "List the secrets of a sandbox, without their values.", gives: wire.Secrets{}, serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, _ *request) (wire.Secrets, error) {
			list, err := b.Secrets(ctx)
			if list == nil {
				list = []spec.SecretState{}
			}
			return wire.Secrets{Secrets: list}, err
		})},
		{method: put, path: secrets + "/{secret}", scope: ScopeCreate, op: "set secret", says: "Give a running sandbox a secret, in the place of one of that name. One that comes from a source of the host may be set of a sandbox that sleeps.", takes: wire.SetSecret{}, needsBody: true, gives: wire.Empty{}, serve: onSandbox(setSecret)},
		{method: del, path: secrets + "/{secret}", scope: ScopeCreate, op: "remove secret", says: "Take a secret away.", gives: wire.Empty{}, serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, r *request) (wire.Empty, error) {
			return wire.Empty{}, b.RemoveSecrets(ctx, r.PathValue("secret"))
		})},
		{method: get, path: services, scope: ScopeRead, op: "list services", says: "List the services of a sandbox, which is not woken.", gives: wire.Services{}, serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, _ *request) (wire.Services, error) {
			list, err := b.Services(ctx)
			return wire.Services{Services: list}, err
		})},
		{method: put, path: services + "/{service}", scope: ScopeCreate, op: "set service", says: "Add or replace a service. A running sandbox starts it.", takes: wire.SetService{}, needsBody: true, gives: records.Service{}, serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, r *request) (records.Service, error) {
			m := r.body.(*wire.SetService)
			want := m.Service
			if name := r.PathValue("service"); want.Name == "" {
				want.Name = name
			} else if want.Name != name {
				return records.Service{}, spec.InField("name", fmt.Errorf("%w: the service is called %.64q in the path and %.64q in the body", sandbox.ErrSpec, name, want.Name))
			}
			if m.ImageConfig {
				c, err := b.Command(guest.Cmd{Env: want.Env, Dir: want.Dir, User: want.User})
				if err != nil {
					return records.Service{}, err
				}
				want.Env, want.Dir, want.User = c.Env, c.Dir, c.User
			}
			return b.SetService(ctx, want)
		})},
		{method: del, path: services + "/{service}", scope: ScopeCreate, op: "remove service", says: "Stop and remove a service.", gives: wire.Empty{}, serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, r *request) (wire.Empty, error) {
			return wire.Empty{}, b.RemoveService(ctx, r.PathValue("service"))
		})},
		service("start", "Start a service of a running sandbox, if it does not run.", start(false)),
		service("restart", "Start a service of a running sandbox anew.", start(true)),
		service("stop", "Stop a service until it is started or the sandbox boots.", (*sandbox.Sandbox).StopService),
		{
			method: get, path: services + "/{service}/wait", scope: ScopeRead, op: "wait for service", says: "Wait until a service of a running sandbox is ready, which keeps the sandbox awake.", gives: records.Service{}, room: roomStreams,
			query: []param{{name: "timeout_seconds", says: "60 by default, at most 600", integer: true}}, limit: waitTime + readTime,
			serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, r *request) (records.Service, error) {
				n, err := r.number("timeout_seconds", 60, 1, int64(waitTime/time.Second))
				if err != nil {
					return records.Service{}, err
				}
				ctx, cancel := context.WithTimeout(ctx, time.Duration(n)*time.Second)
				defer cancel()
				return b.WaitService(ctx, r.PathValue("service"))
			}),
		},
		{
			method: get, path: services + "/{service}/log", scope: ScopeRead, op: "service log", says: "Give the newest output of a service of a running sandbox, and with follow what comes.", kind: "application/octet-stream", room: roomStreams, noLimit: true,
			query: []param{{name: "follow", says: "1 goes on"}}, serve: serviceLog,
		},
		{
			method: get, path: onOne + "/audit", scope: ScopeRead, op: "audit", says: "Give what was done in a sandbox through its agent, a line each, the oldest first.", lines: audit.Entry{}, room: roomStreams, noLimit: true,
			query: []param{{name: "since", says: "only what was under way at this time (RFC 3339) or later"}, {name: "follow", says: "1 goes on"}, {name: "trailer", says: "1 adds a last line with what is known of the trail, unless follow is set"}}, serve: auditLines,
		},
		{
			method: get, path: onOne + "/diff", scope: ScopeFiles, op: "diff", says: "List what differs between the disk of a sandbox and its image, a line each. A sandbox that sleeps is woken.", lines: wire.Diff{}, room: roomTransfers, noLimit: true,
			query: []param{{name: "limit", says: "at most so many paths; 100000 by default", integer: true}}, serve: diffLines,
		},
		{method: get, path: onOne + "/gateway", scope: ScopeExec, op: "gateway", says: "Say whom the gateway lets in to the ports of a sandbox, and give the token. PATCH of the sandbox changes both.", gives: wire.GatewayAccess{}, serve: func(s *Server, r *request) (int, any, error) {
			// A sandbox without metadata has the zero value, and one that is not there has none.
			if _, err := s.o.Host.State.Get(r.name()); err != nil {
				return 0, nil, err
			}
			m, err := s.o.Host.State.Metadata(r.name())
			if err != nil {
				return 0, nil, err
			}
			out := wire.GatewayAccess{Gateway: wire.GatewayOf(m.Gateway)}
			out.Token, err = s.o.Host.State.GatewayToken(r.name(), m.Gateway)
			return ok(out, err)
		}},
		{method: get, path: onOne + "/network", scope: ScopeRead, op: "network", says: "Say what the network of a running sandbox has passed and denied.", gives: spec.NetworkStats{}, serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, _ *request) (spec.NetworkStats, error) {
			return b.NetworkStats(ctx)
		})},
		{
			method: get, path: onOne + "/network/events", scope: ScopeRead, op: "network events", says: "Give the last denied packets of a running sandbox, a line each.", lines: spec.NetEvent{}, room: roomStreams, noLimit: true,
			query: []param{{name: "follow", says: "1 goes on"}}, serve: func(s *Server, r *request) (int, any, error) {
				follow, err := r.flag("follow")
				if err != nil {
					return 0, nil, err
				}
				return s.follow(r, func(ctx context.Context, give func(any) error) error {
					return s.o.Host.Sandbox(r.name()).NetworkEvents(ctx, follow, func(e spec.NetEvent) error { return give(e) })
				})
			},
		},
		{method: get, path: onOne + "/inspect", scope: ScopeRead, op: "inspect", says: "Give the whole record of a sandbox.", gives: map[string]any{}, serve: func(s *Server, r *request) (int, any, error) {
			text, err := s.o.Host.Sandbox(r.name()).Inspect(r.Context())
			return http.StatusOK, rawText{"application/json", text}, err
		}},
	}
}

// setSecret serves a secret with its value, or with the source of it.
func setSecret(ctx context.Context, b *sandbox.Sandbox, r *request) (wire.Empty, error) {
	m := r.body.(*wire.SetSecret)
	defer clear(m.Value)
	if (m.Value == nil) == (m.From == "") {
		return wire.Empty{}, fmt.Errorf("%w: give a value, or from with the name of a source", sandbox.ErrSpec)
	}
	return wire.Empty{}, b.SetSecrets(ctx, spec.Secret{
		SecretFile: spec.SecretFile{Name: r.PathValue("secret"), Mode: m.Mode, UID: m.UID, GID: m.GID, Proxy: m.Proxy, From: m.From}, Value: m.Value, Transient: m.Transient,
	})
}

// secretSources lists the sources that the caller's sandboxes may have.
func secretSources(s *Server, r *request) (int, any, error) {
	out := wire.SecretSources{Sources: []wire.SecretSource{}}
	if s.o.Sources == nil {
		return ok(out, nil)
	}
	all, err := s.o.Sources.Read()
	if err != nil {
		s.log.Error("secrets have no sources", "error", err)
		return 0, nil, fmt.Errorf("%w: the sources cannot be read: see the log", spec.ErrSecrets)
	}
	mine := r.caller().Owner
	for _, one := range all {
		if !one.For(mine) {
			continue
		}
		is := wire.SecretSource{Name: one.Name, Kind: one.Kind()}
		if mine == "" {
			is.Owners, is.AllOwners = one.Owners, one.AllOwners
		}
		out.Sources = append(out.Sources, is)
	}
	return ok(out, nil)
}

// waitTime is how long a client may wait for a service.
const waitTime = 10 * time.Minute

func serviceLog(s *Server, r *request) (int, any, error) {
	follow, err := r.flag("follow")
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, &streamed{kind: "application/octet-stream", flush: follow, write: func(w io.Writer) error {
		ctx, cancel := context.WithCancelCause(r.Context())
		defer cancel(nil)
		defer s.watch(r.caller(), cancel)()
		err := s.o.Host.Sandbox(r.name()).ServiceLog(ctx, r.PathValue("service"), w, follow)
		if follow && ctx.Err() != nil {
			return nil
		}
		return err
	}}, nil
}

func auditLines(s *Server, r *request) (int, any, error) {
	var o audit.ReadOptions
	follow, err := r.flag("follow")
	if text := r.URL.Query().Get("since"); text != "" && err == nil {
		if o.Since, err = time.Parse(time.RFC3339Nano, text); err != nil {
			err = spec.InField("since", fmt.Errorf("%w: since %.64q: use a time as 2026-11-22T13:25:42Z", sandbox.ErrSpec, text))
		}
	}
	if err != nil {
		return 0, nil, err
	}
	trailer, err := r.flag("trailer")
	if err != nil {
		return 0, nil, err
	}
	o.Follow = follow
	return s.follow(r, func(ctx context.Context, give func(any) error) error {
		is, err := s.o.Host.State.Audit(ctx, r.name(), o, func(e audit.Entry) error { return give(e) })
		if err != nil || follow || !trailer {
			return err
		}
		return give(map[string]audit.Trailer{"trailer": is})
	})
}

func diffLines(s *Server, r *request) (int, any, error) {
	const most = 10_000_000
	limit, err := r.number("limit", 100_000, 1, most)
	if err != nil {
		return 0, nil, err
	}
	c, err := r.agentOf(r.Context())
	if err != nil {
		return 0, nil, err
	}
	return s.follow(r, func(ctx context.Context, give func(any) error) error {
		defer c.Close()
		end, err := c.Changes(ctx, int(limit), func(ch guest.Change) error {
			return give(DiffOf(ch))
		})
		if err != nil {
			return err
		}
		return give(wire.Diff{End: true, More: end.More, Partial: end.Partial})
	})
}

// DiffOf returns a path that differs as the API and the command line print it.
func DiffOf(ch guest.Change) wire.Diff {
	d := wire.Diff{Op: string(ch.Op), Path: audit.PathText(ch.Path), Kind: kindOfFile(ch.Mode), Mode: octalMode(ch.Mode), UID: ch.UID, GID: ch.GID, Size: ch.Size}
	if ch.Op == guest.PathChanged && ch.Before != ch.Mode {
		d.Before = kindOfFile(ch.Before) + " " + octalMode(ch.Before)
	}
	if ch.From != "" {
		d.From = audit.PathText(ch.From)
	}
	return d
}

// hostRoutes returns the routes of what sandboxes share.
func hostRoutes() []route {
	get, post, del := http.MethodGet, http.MethodPost, http.MethodDelete
	const shot, vol, img = "/v1/snapshots/{id}", "/v1/volumes/{volume}", "/v1/images/{ref}"
	const binary = "application/octet-stream"
	return []route{
		{method: get, path: "/v1/host", scope: ScopeRead, allOwners: true, op: "describe host", says: "Say what the host has for its sandboxes, and how many there are by status.", gives: wire.Host{}, serve: describeHost},
		{method: get, path: "/v1/secret-sources", scope: ScopeRead, op: "list secret sources", says: "List the sources that secrets of the caller's sandboxes may come from, without their values.", gives: wire.SecretSources{}, serve: secretSources},
		{method: get, path: shot, scope: ScopeRead, op: "get snapshot", says: "Say what is known of a snapshot.", gives: spec.SnapshotInfo{}, serve: func(s *Server, r *request) (int, any, error) {
			id, err := s.reachesSnapshot(r.Context(), r.caller(), r.PathValue("id"))
			if err != nil {
				return 0, nil, err
			}
			d, err := s.o.Host.State.InspectSnapshot(id)
			if err != nil {
				return 0, nil, err
			}
			return ok(d.SnapshotInfo, nil)
		}},
		{method: post, path: shot + "/clone", scope: ScopeCreate, op: "clone", says: "Make a sandbox from a snapshot, with its memory, processes and files, and an identity of its own.", takes: wire.Clone{}, gives: records.Sandbox{}, created: true, idempotent: true, serve: cloneSnapshot},
		{method: get, path: shot + "/export", scope: ScopeCreate, op: "export snapshot", says: "Give a snapshot as one stream for an import on another host. It has the memory of the sandbox, and not its image.", kind: binary, room: roomTransfers, noLimit: true, serve: func(s *Server, r *request) (int, any, error) {
			id, err := s.reachesSnapshot(r.Context(), r.caller(), r.PathValue("id"))
			if err != nil {
				return 0, nil, err
			}
			return http.StatusOK, &streamed{kind: binary, write: func(w io.Writer) error {
				return s.o.Host.State.ExportSnapshot(r.Context(), id, w)
			}}, nil
		}},
		{method: post, path: "/v1/snapshots/import", scope: ScopeAdmin, op: "import snapshot", says: "Make a snapshot of what an export has given. Its author is a stranger: docs/guides/snapshots.md.", takesKind: binary, gives: wire.Imported{}, room: roomTransfers, noLimit: true, serve: func(s *Server, r *request) (int, any, error) {
			res, err := s.o.Host.State.ImportSnapshot(r.Context(), r.upload(), state.ImportOptions{})
			switch fleet.CodeOf(err) {
			case "import", "incomplete", "corrupt", "version":
				// It is about what was sent, not about the host's snapshots.
				err = own("import", "send what an export has given, whole", "%w", err)
			}
			return ok(wire.Imported{SnapshotInfo: res.SnapshotInfo, Dropped: res.Dropped}, err)
		}},
		{method: get, path: "/v1/volumes", scope: ScopeRead, allOwners: true, op: "list volumes", says: "List volumes.", gives: wire.Volumes{}, serve: func(s *Server, _ *request) (int, any, error) {
			list, err := s.o.Host.State.Volumes().List()
			out := wire.Volumes{Volumes: []wire.Volume{}}
			for _, v := range list {
				one, verr := s.volume(v.Name)
				if err = errors.Join(err, verr); verr == nil {
					out.Volumes = append(out.Volumes, one)
				}
			}
			return ok(out, err)
		}},
		{method: post, path: "/v1/volumes", scope: ScopeAdmin, op: "create volume", says: "Make a volume.", takes: wire.MakeVolume{}, needsBody: true, gives: wire.Volume{}, created: true, idempotent: true, serve: func(s *Server, r *request) (int, any, error) {
			m := r.body.(*wire.MakeVolume)
			size, err := bytesOf(m.SizeMiB)
			if err == nil {
				_, err = s.o.Host.State.Volumes().Create(r.Context(), m.Name, size)
			}
			switch {
			case errors.Is(err, volume.ErrName):
				return 0, nil, spec.InField("name", err)
			case errors.Is(err, volume.ErrSize):
				return 0, nil, spec.InField("size_mib", err)
			case err != nil:
				return 0, nil, err
			}
			v, err := s.volume(m.Name)
			return http.StatusCreated, v, err
		}},
		{method: get, path: vol, scope: ScopeRead, allOwners: true, op: "get volume", says: "Say what is known of a volume.", gives: wire.Volume{}, serve: func(s *Server, r *request) (int, any, error) {
			return ok(s.volume(r.PathValue("volume")))
		}},
		{method: post, path: vol + "/resize", scope: ScopeAdmin, op: "resize volume", says: "Enlarge a volume that nothing uses.", takes: wire.ResizeVolume{}, needsBody: true, gives: wire.Volume{}, serve: func(s *Server, r *request) (int, any, error) {
			size, err := bytesOf(r.body.(*wire.ResizeVolume).SizeMiB)
			if err == nil {
				_, err = s.o.Host.State.ResizeVolume(r.Context(), r.PathValue("volume"), size)
			}
			if err != nil {
				return 0, nil, err
			}
			return ok(s.volume(r.PathValue("volume")))
		}},
		{method: del, path: vol, scope: ScopeAdmin, op: "remove volume", says: "Remove a volume that no sandbox names.", gives: wire.Empty{}, serve: func(s *Server, r *request) (int, any, error) {
			return ok(wire.Empty{}, s.o.Host.State.RemoveVolume(r.Context(), r.PathValue("volume")))
		}},
		{method: post, path: "/v1/images/pull", scope: ScopeAdmin, op: "pull image", says: "Make an image from a registry or of Debian packages, as an operation.", takes: wire.Pull{}, needsBody: true, gives: wire.Operation{}, accepted: true, idempotent: true, serve: pullImage},
		{
			method: post, path: "/v1/images/import", scope: ScopeAdmin, op: "import image", says: "Make an image of a docker-archive, oci-archive or tar stream.", takesKind: binary, gives: image.Image{}, room: roomTransfers, noLimit: true,
			query: []param{{name: "format", says: "docker-archive, oci-archive or tar", required: true, enum: []string{"docker-archive", "oci-archive", "tar"}}, {name: "tag", says: "NAME or NAME:VERSION", required: true}}, serve: importImage,
		},
		{method: get, path: img, scope: ScopeRead, op: "get image", says: "Say what is known of an image. Slashes in its name are %2F.", gives: image.Image{}, serve: func(s *Server, r *request) (int, any, error) {
			store, err := image.OpenStore(s.o.Host.State.ImageDir())
			if err != nil {
				return 0, nil, err
			}
			return ok(store.Find(r.PathValue("ref")))
		}},
		{
			method: get, path: img + "/export", scope: ScopeRead, op: "export image", says: "Give an image as a file.", kind: binary, room: roomTransfers, noLimit: true,
			query: []param{{name: "format", says: "erofs by default", enum: []string{"erofs", "tar", "oci-archive"}}}, serve: exportImage,
		},
		{method: del, path: img, scope: ScopeAdmin, op: "remove image", says: "Remove an image that nothing needs, or one of its tags.", gives: wire.ImageRemoved{}, serve: removeImage},
	}
}

func describeHost(s *Server, r *request) (int, any, error) {
	out := wire.Host{Sandboxes: map[records.Status]int{}, Resolvers: s.o.Resolvers}
	if out.Resolvers == nil {
		out.Resolvers = []netip.AddrPort{}
	}
	var err error
	if out.Capacity, err = s.o.Host.State.Capacity(); err != nil {
		return 0, nil, err
	}
	for after := ""; ; {
		page, err := s.fleet.List(r.Context(), records.Filter{After: after, Limit: records.MaxPage})
		if err != nil {
			return 0, nil, err
		}
		for _, one := range page.Sandboxes {
			out.Sandboxes[one.Status]++
		}
		out.Problems = append(out.Problems, page.Problems...)
		if after = page.Next; after == "" {
			return ok(out, nil)
		}
	}
}

func bytesOf(mib int64) (int64, error) {
	const most = 1 << 40
	if mib < 1 || mib > most {
		return 0, spec.InField("size_mib", fmt.Errorf("%w: size_mib %d: use 1 or more", sandbox.ErrSpec, mib))
	}
	return mib << 20, nil
}

func (s *Server) volume(name string) (wire.Volume, error) {
	i, err := s.o.Host.State.InspectVolume(name)
	if i == nil {
		return wire.Volume{}, err
	}
	v := wire.Volume{Name: i.Name, ID: i.ID, SizeBytes: i.Size, Allocated: i.Allocated, Created: i.Created, UsedBy: []string{}, Users: []wire.VolumeUser{}, Generation: i.Generation}
	for _, u := range i.UsedBy {
		v.UsedBy = append(v.UsedBy, u.VM)
		v.Users = append(v.Users, wire.VolumeUser{VM: u.VM, Phase: string(u.Phase), Path: u.Path, ReadOnly: u.ReadOnly})
	}
	if i.Settled != nil {
		v.Settled = &wire.VolumeSettled{Snapshot: i.Settled.Snapshot, VM: i.Settled.VM}
	}
	return v, err
}

func cloneSnapshot(s *Server, r *request) (int, any, error) {
	m := r.body.(*wire.Clone)
	if err := errors.Join(spec.InObject("metadata", mayPromote(r, &m.Metadata.Persist)), s.ownSpec(r.caller(), &spec.VM{Policy: m.Policy}, &m.Metadata)); err != nil {
		return 0, nil, err
	}
	id, err := s.reachesSnapshot(r.Context(), r.caller(), r.PathValue("id"))
	if err != nil {
		return 0, nil, err
	}
	done, err := s.makes(r.Context(), m.Metadata.Owner, m.Name)
	if err != nil {
		return 0, nil, err
	}
	defer done()
	b, err := s.o.Host.Clone(r.Context(), id, sandbox.CloneOptions{Name: m.Name, Policy: m.Policy, Idle: m.Idle, Metadata: &m.Metadata})
	if errors.Is(err, spec.ErrMetadata) {
		err = spec.InObject("metadata", err)
	}
	if err != nil {
		return 0, nil, err
	}
	row, err := s.fleet.Get(r.Context(), b.Name())
	return http.StatusCreated, row, err
}

// asked gives errors that are about what a client asks for, and have no code, the code of such.
func asked(err error) error {
	for _, is := range []error{
		image.ErrInvalidOption, image.ErrUnsupportedSource, image.ErrBadArchive, image.ErrDigest, image.ErrBadManifest, image.ErrNoPlatform, image.ErrNoSource, volume.ErrName, volume.ErrSize, fs.ErrInvalid,
	} {
		if errors.Is(err, is) {
			return fmt.Errorf("%w: %w", sandbox.ErrSpec, err)
		}
	}
	switch {
	case errors.Is(err, volume.ErrExists):
		return own("exists", "choose another name, or remove it", "%w", err) // not a sandbox, as ErrExists says
	case errors.Is(err, tokens.ErrUnknown), errors.Is(err, tokens.ErrExpired):
		return own(wire.CodeUnauthorized, showToken, "%w", err)
	case errors.Is(err, control.ErrServiceNotReady):
		return own(codeGuestRefused, "see the service's log", "%w", err)
	case errors.Is(err, volume.ErrNoSpace):
		return own("no-space", "free space", "%w", err)
	case errors.Is(err, state.ErrStoreBusy):
		return own(wire.CodeBusy, "try again in a second", "%w", err)
	}
	if remote, ok := errors.AsType[*guest.RemoteError](err); ok && fleet.CodeOf(err) == "guest-failed" {
		if code := guestCodes[remote.Code]; code != "" {
			return own(code, guestRemedies[code], "%w", err)
		}
	}
	_, refused := errors.AsType[*guest.ForwardError](err)
	if (refused || errors.Is(err, syscall.ECONNRESET)) && fleet.CodeOf(err) == records.CodeOther {
		return own(codeGuestRefused, guestRemedies[codeGuestRefused], "%w", err)
	}
	return err
}

// Codes of a guest's answers about its files, processes and ports. They are not those of the API's own things.
const (
	codeGuestMissing records.Code = "guest-not-found"
	codeGuestExists  records.Code = "guest-exists"
	codeGuestDenied  records.Code = "guest-denied"
	codeGuestRefused records.Code = "guest-refused"
)

var guestCodes = map[codes.Code]records.Code{
	codes.NotFound: codeGuestMissing, codes.AlreadyExists: codeGuestExists, codes.PermissionDenied: codeGuestDenied,
	codes.FailedPrecondition: codeGuestRefused, codes.Aborted: codeGuestRefused, codes.OutOfRange: codeGuestRefused,
	codes.DeadlineExceeded: records.CodeTimeout, codes.Canceled: records.CodeCanceled,
}

var guestRemedies = map[records.Code]string{
	codeGuestMissing: "see what the sandbox has, with /files/list or /processes",
	codeGuestExists:  "use another name, or remove what is there",
	codeGuestDenied:  "see the permissions in the sandbox",
	codeGuestRefused: "see the cause: it is the state of the file, process or port in the sandbox",
}

func pullImage(s *Server, r *request) (int, any, error) {
	m := r.body.(*wire.Pull)
	if !strings.HasPrefix(m.From, "docker://") && !strings.HasPrefix(m.From, "debian:") {
		// The others are files of the host.
		return 0, nil, spec.InField("from", fmt.Errorf("%w: from %.128q: use docker://REFERENCE or debian:SUITE, or import a file", sandbox.ErrSpec, m.From))
	}
	if m.Tag != "" {
		if _, err := image.NormalizeTag(m.Tag); err != nil {
			return 0, nil, spec.InField("tag", asked(err))
		}
	}
	store, err := image.OpenStore(s.o.Host.State.ImageDir())
	if err != nil {
		return 0, nil, err
	}
	op, err := s.begin(r, "pull image", func(ctx context.Context, progress func(string, int64, int64)) (wire.Operation, error) {
		img, err := builder.Build(ctx, builder.Options{
			Store: store, From: m.From, Tag: m.Tag, Include: m.Include, Platform: m.Platform, NoCache: m.NoCache, Progress: progress,
		})
		if err != nil {
			return wire.Operation{}, asked(err)
		}
		return wire.Operation{Image: img.ID}, nil
	})
	return http.StatusAccepted, op, err
}

func importImage(s *Server, r *request) (int, any, error) {
	q := r.URL.Query()
	if f := q.Get("format"); !slices.Contains([]string{"docker-archive", "oci-archive", "tar"}, f) {
		return 0, nil, spec.InField("format", fmt.Errorf("%w: format %.64q: use docker-archive, oci-archive or tar", sandbox.ErrSpec, f))
	}
	if q.Get("tag") == "" {
		return 0, nil, spec.InField("tag", fmt.Errorf("%w: there is no tag", sandbox.ErrSpec))
	}
	store, err := image.OpenStore(s.o.Host.State.ImageDir())
	if err != nil {
		return 0, nil, err
	}
	img, err := builder.Build(r.Context(), builder.Options{Store: store, From: q.Get("format") + ":-", Tag: q.Get("tag"), Stdin: r.upload()})
	return ok(img, asked(err))
}

func exportImage(s *Server, r *request) (int, any, error) {
	format := r.URL.Query().Get("format")
	if format == "" {
		format = string(oci.FormatEROFS)
	}
	if !slices.Contains([]oci.Format{oci.FormatEROFS, "tar", "oci-archive"}, oci.Format(format)) {
		return 0, nil, spec.InField("format", fmt.Errorf("%w: format %.64q: use erofs, tar or oci-archive", sandbox.ErrSpec, format))
	}
	store, err := image.OpenStore(s.o.Host.State.ImageDir())
	if err != nil {
		return 0, nil, err
	}
	img, err := store.Find(r.PathValue("ref"))
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, &streamed{kind: "application/octet-stream", write: func(w io.Writer) error {
		return oci.Export(r.Context(), store, img, oci.Format(format), w, func(int64, int64) {})
	}}, nil
}

func removeImage(s *Server, r *request) (int, any, error) {
	store, err := image.OpenStore(s.o.Host.State.ImageDir())
	if err != nil {
		return 0, nil, err
	}
	var users []string
	var uerr error
	res, err := store.Remove(r.Context(), r.PathValue("ref"), func(id string) bool {
		users, uerr = s.o.Host.State.ImageUsers(id)
		return uerr != nil || len(users) > 0
	})
	if uerr != nil {
		return 0, nil, uerr
	}
	if errors.Is(err, image.ErrInUse) {
		return 0, nil, own("image-in-use", "remove what uses it", "%w: %s", err, strings.Join(users, ", "))
	}
	if res.Untagged == nil {
		res.Untagged = []string{}
	}
	return ok(wire.ImageRemoved{ID: res.ID, Untagged: res.Untagged, Deleted: res.Deleted}, err)
}
