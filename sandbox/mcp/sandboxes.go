package mcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

const (
	// createTime bounds a creation with its pull. useTime bounds what may wake a sandbox.
	createTime = 15 * time.Minute
	useTime    = 2 * time.Minute
	// maxImages bounds the images in a list, and maxForks the children of a fork.
	maxImages = 100
	maxForks  = 16
	// defaultMemoryMiB is a sandbox's memory unless the model or Options.MemoryMiB say less.
	defaultMemoryMiB = 512
)

// one is the argument of most tools.
type one struct {
	Sandbox string `json:"sandbox" jsonschema:"name of the sandbox"`
}

// box is what the model gets to know of a sandbox.
type box struct {
	Name      string    `json:"sandbox" jsonschema:"its name, for the other tools"`
	Status    string    `json:"status" jsonschema:"running, asleep (any use wakes it), stopped or crashed (any use boots it), creating, waiting or expired"`
	Image     string    `json:"image"`
	VCPUs     int       `json:"vcpus"`
	MemoryMiB int       `json:"memory_mib"`
	Network   bool      `json:"network" jsonschema:"whether set_policy can allow it destinations"`
	Parent    string    `json:"parent,omitempty" jsonschema:"the sandbox that it was forked from"`
	Problem   string    `json:"problem,omitempty"`
	Created   time.Time `json:"created"`
}

func boxOf(r records.Sandbox) box {
	return box{r.Name, string(r.Status), r.Image, r.VCPUs, r.Memory, r.Network == spec.NetworkTAP, r.Parent, r.Problem, r.Created}
}

// get returns a sandbox as the model sees it.
func (s *Server) get(ctx context.Context, name string) (box, error) {
	r, err := s.fleet.Get(ctx, name)
	return boxOf(r), err
}

type createIn struct {
	Name      string   `json:"name,omitempty" jsonschema:"1 to 40 lower-case letters, digits and hyphens; made up if absent"`
	Image     string   `json:"image,omitempty" jsonschema:"image to make it from, one that list_sandboxes names; absent takes the first"`
	VCPUs     int      `json:"vcpus,omitempty" jsonschema:"number of CPUs; absent is 1"`
	MemoryMiB int      `json:"memory_mib,omitempty" jsonschema:"RAM in MiB; absent is 512, or the maximum if that is less"`
	Allow     []string `json:"allow,omitempty" jsonschema:"network destinations that it may reach; absent or empty is none"`
	Command   []string `json:"command,omitempty" jsonschema:"a command to run in it at once, as exec does with its defaults"`
}

type createOut struct {
	box
	Allow  []string `json:"allow" jsonschema:"network destinations that it may reach"`
	Result *execOut `json:"result,omitempty" jsonschema:"of command"`
	// Failed is set if the sandbox was made and its command could not be run.
	Failed string `json:"command_failed,omitempty" jsonschema:"why command could not be run; the sandbox is there"`
}

type listOut struct {
	Sandboxes []box    `json:"sandboxes"`
	Most      int      `json:"max_sandboxes" jsonschema:"how many there may be"`
	Images    []string `json:"images" jsonschema:"images that create_sandbox takes"`
	Allow     []string `json:"allow" jsonschema:"network destinations that a sandbox may be allowed; without any there is no network"`
}

type sleepOut struct {
	Sandbox string `json:"sandbox"`
	Status  string `json:"status"`
}

type forkIn struct {
	one
	Count int `json:"count,omitempty" jsonschema:"number of children; absent is 1"`
}

type forkOut struct {
	Sandboxes []string `json:"sandboxes" jsonschema:"names of the children, which run"`
}

type deleteOut struct {
	Deleted string `json:"deleted"`
}

func (s *Server) addSandboxes() {
	add(s, tool{
		name: "create_sandbox", title: "Create a sandbox", limit: createTime, world: true,
		says: fmt.Sprintf("Make a Linux sandbox, boot it, and optionally run a command in it. It has a disk of %d MiB, no network unless allow names "+
			"destinations, and nothing of the host. It stays until delete_sandbox. Fails if there are %d sandboxes, or the image is not one of those that may be used.", s.o.DiskMiB, s.o.Sandboxes),
		edit: func(in *jsonschema.Schema) {
			between(in, "vcpus", 1, s.o.VCPUs)
			between(in, "memory_mib", spec.MinMemoryMiB, s.o.MemoryMiB)
			property(in, "name").Pattern = spec.NamePattern
			property(in, "image").MaxLength = new(512)
			bounded(in, "command")
			if len(s.o.Images) > 0 {
				oneOf(in, "image", s.o.Images)
			}
			s.allowSchema(in)
		},
	}, s.create)
	add(s, tool{
		name: "list_sandboxes", title: "List sandboxes", readOnly: true, idempotent: true, limit: useTime,
		says: "List the sandboxes that you may use, the images that new ones can be made from, and the network destinations that can be allowed. Wakes nothing.",
	}, func(ctx context.Context, _ *call, _ struct{}) (listOut, error) {
		all, err := s.list(ctx)
		out := listOut{Sandboxes: []box{}, Most: s.o.Sandboxes, Allow: append([]string{}, s.o.Allow...)}
		for _, r := range all[:min(len(all), MaxSandboxes)] {
			out.Sandboxes = append(out.Sandboxes, boxOf(r))
		}
		var ierr error
		out.Images, ierr = s.images()
		return out, errors.Join(err, ierr)
	})
	add(s, tool{
		name: "sleep_sandbox", title: "Put a sandbox to sleep", idempotent: true, limit: useTime, edit: named,
		says: "Put a sandbox to sleep: memory, processes and files are kept, CPU and RAM are freed. The next exec or file tool wakes it in " +
			"milliseconds. Open connections are cut. Of one that sleeps it changes nothing. Fails, and lets it run on, if a hook in it refuses.",
	}, func(ctx context.Context, _ *call, in one) (sleepOut, error) {
		b, err := s.sandbox(in.Sandbox)
		if err != nil {
			return sleepOut{}, err
		}
		if _, err := b.Sleep(ctx, sandbox.SleepOptions{}); err != nil {
			return sleepOut{}, err
		}
		return sleepOut{in.Sandbox, string(records.Asleep)}, nil
	})
	add(s, tool{
		name: "fork_sandbox", title: "Fork a sandbox", limit: useTime,
		says: fmt.Sprintf("Make children that continue from this moment of a sandbox, with its memory, processes, files and network policy; it goes on itself. "+
			"Use them to try several ways at once. 1 to %d children. They count as sandboxes.", maxForks),
		edit: func(in *jsonschema.Schema) { named(in); between(in, "count", 1, maxForks) },
	}, s.fork)
	add(s, tool{
		name: "delete_sandbox", title: "Delete a sandbox", destructive: true, idempotent: true, limit: useTime, edit: named,
		says: "Delete a sandbox for good, with its files, also while it runs. Its forks stay.",
	}, func(ctx context.Context, _ *call, in one) (deleteOut, error) {
		b, err := s.sandbox(in.Sandbox)
		if err != nil {
			return deleteOut{}, err
		}
		return deleteOut{in.Sandbox}, b.Delete(ctx, sandbox.DeleteOptions{Force: true})
	})
}

// images returns the names of images that may be used.
func (s *Server) images() ([]string, error) {
	out := append([]string{}, s.o.Images...)
	if len(out) > 0 {
		return out, nil
	}
	store, err := image.OpenStore(s.o.Host.State.ImageDir())
	if err != nil {
		return out, err
	}
	list, err := store.List()
	for _, i := range list {
		if len(i.Tags) > 0 && len(out) < maxImages {
			out = append(out, strings.TrimSuffix(i.Tags[0], ":latest"))
		}
	}
	slices.Sort(out)
	return out, err
}

func (s *Server) create(ctx context.Context, c *call, in createIn) (out createOut, err error) {
	if len(in.Command) > 0 {
		if err := checkCommand(in.Command); err != nil {
			return out, err
		}
	}
	images, err := s.images()
	if err != nil && in.Image == "" {
		return out, err
	}
	if in.Image == "" {
		if len(images) == 0 {
			return out, errors.New("the host has no image: its user makes one with `drowse pull`, or starts this server with --image")
		}
		in.Image = images[0]
	}
	if len(s.o.Images) > 0 && !slices.Contains(s.o.Images, in.Image) {
		return out, fmt.Errorf("image %.128q may not be used: use one of %s", in.Image, strings.Join(s.o.Images, ", "))
	}
	want := sandbox.Spec{
		Name: cmp.Or(in.Name, newName()), VCPUs: cmp.Or(in.VCPUs, 1), MemoryMiB: cmp.Or(in.MemoryMiB, min(defaultMemoryMiB, s.o.MemoryMiB)),
		DiskMiB: s.o.DiskMiB, Idle: s.o.idle(), Network: spec.NetworkNone,
	}
	if want.VCPUs < 1 || want.VCPUs > s.o.VCPUs || want.MemoryMiB < spec.MinMemoryMiB || want.MemoryMiB > s.o.MemoryMiB {
		return out, fmt.Errorf("%d CPUs and %d MiB: use 1 to %d CPUs and %d to %d MiB", want.VCPUs, want.MemoryMiB, s.o.VCPUs, spec.MinMemoryMiB, s.o.MemoryMiB)
	}
	if err := s.mayAllow(in.Allow); err != nil {
		return out, err
	}
	if len(s.o.Allow) > 0 {
		want.Network = spec.NetworkTAP // also without destinations: set_policy needs it
		if want.Policy, err = s.policy(in.Allow, &netpolicy.Policy{}); err != nil {
			return out, err
		}
	}
	release, err := s.reserve(ctx, want.Name)
	if err != nil {
		return out, err
	}
	defer release()
	img, err := s.o.Image(ctx, in.Image, c.progress)
	if errors.Is(err, image.ErrNotFound) && len(s.o.Images) == 0 {
		return out, fmt.Errorf("the host has no image %.128q: use one of %s; its user adds others with `drowse pull`", in.Image, cmp.Or(strings.Join(images, ", "), "none"))
	}
	if err != nil {
		return out, err
	}
	want.Image = img.ID
	if len(img.Tags) > 0 {
		want.Image = img.Tags[0]
	}
	c.say("boot")
	b, err := s.o.Host.Create(ctx, want, sandbox.CreateOptions{Metadata: &spec.Metadata{Owner: s.o.Owner, Purpose: "made by a model, through drowse mcp"}})
	if errors.Is(err, sandbox.ErrExists) {
		return out, fmt.Errorf("the name %s is taken: use another, or none", want.Name)
	}
	if err != nil {
		return out, err
	}
	if s.o.Booted != nil {
		s.o.Booted(want.Name)
	}
	if out.box, err = s.get(ctx, b.Name()); err != nil {
		return out, err
	}
	out.Allow = append([]string{}, in.Allow...)
	if len(in.Command) > 0 {
		res, err := s.exec(ctx, c, execIn{one: one{b.Name()}, Command: in.Command})
		if err != nil {
			// The model must learn the name.
			out.Failed = toolError(err).Error()
		} else {
			out.Result = &res
		}
	}
	return out, nil
}

func (s *Server) fork(ctx context.Context, _ *call, in forkIn) (out forkOut, err error) {
	b, err := s.sandbox(in.Sandbox)
	if err != nil {
		return out, err
	}
	n := cmp.Or(in.Count, 1)
	if n < 1 || n > maxForks {
		return out, fmt.Errorf("%d children: use 1 to %d", n, maxForks)
	}
	var children []sandbox.ForkChild
	var names []string
	for range n {
		name := newName()
		children, names = append(children, sandbox.ForkChild{Name: name}), append(names, name)
	}
	release, err := s.reserve(ctx, names...)
	if err != nil {
		return out, err
	}
	defer release()
	res, err := b.Fork(ctx, sandbox.ForkOptions{Children: children})
	for _, r := range res.Children {
		out.Sandboxes = append(out.Sandboxes, r.Name)
	}
	return out, err
}
