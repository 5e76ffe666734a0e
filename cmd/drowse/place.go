package main

import (
	"context"
	"encoding/json"
	"io"
	"time"

	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/guest/report"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// place is where the VMs are: the state directory of this host (type local), or a server (type farHost). Commands that
// work in both call it alone, so that their output is the same. Exported methods are those of client.Client.
type place interface {
	List(context.Context, records.Filter) (records.List, error)
	Get(ctx context.Context, name string) (records.Sandbox, error)
	History(ctx context.Context, name string, span records.Span) (records.History, error)
	Update(ctx context.Context, name string, c records.Changes) (records.Sandbox, error)
	Rename(ctx context.Context, name, to string) (records.Sandbox, error)
	Prune(ctx context.Context, dryRun bool) (records.Pruned, error)
	Sleep(ctx context.Context, name string, o spec.SleepOptions) (spec.SleepResult, error)
	Migrate(ctx context.Context, name string, o spec.MigrateOptions) (spec.MigrateResult, error)
	Snapshot(ctx context.Context, name string, o spec.SnapshotOptions) (spec.SleepResult, error)
	Promote(ctx context.Context, name string) ([]spec.Promoted, error)
	Stats(ctx context.Context, name string) (spec.Stats, error)
	Policy(ctx context.Context, name string) (*netpolicy.Policy, error)
	SetPolicy(ctx context.Context, name string, p *netpolicy.Policy) (spec.PolicyResult, error)
	TagSnapshot(ctx context.Context, snapshot string, tags []string) (spec.SnapshotInfo, error)
	RemoveSnapshot(ctx context.Context, snapshot string) error

	// ready fails where VMs could not be started.
	ready(context.Context) error
	// note explains the state of a VM; pid is its process, where that is known.
	note(context.Context, records.Sandbox) (pid int, note string, err error)
	idle(ctx context.Context, name string) (spec.Idle, spec.Hooks, error)
	run(context.Context, *runRequest) error
	start(ctx context.Context, name string, discardMemory bool) (cameUp, error)
	wake(ctx context.Context, name string) (cameUp, error)
	clone(ctx context.Context, snapshot string, o cloneOptions) (cameUp, error)
	// rewind takes a VM back to its snapshot, and wakes it.
	rewind(ctx context.Context, name, snapshot string) (cameUp, error)
	fork(ctx context.Context, name string, o forkOptions) (forked, error)
	// evacuees are the VMs that this host has, without those that already sleep in the store of its cluster.
	evacuees(context.Context) (records.List, error)
	sleepAll(context.Context, spec.SleepOptions) (asleep, awake []string, err error)
	stop(ctx context.Context, name string, limit time.Duration) error
	kill(ctx context.Context, name string) error
	// signal sends a signal to a process of a VM, which is not woken.
	signal(ctx context.Context, name, process string, signal int) error
	remove(ctx context.Context, name string, force bool) (spec.Freed, error)
	snapshots(context.Context) ([]spec.SnapshotInfo, error)
	images(context.Context) ([]imageRow, error)
	pull(ctx context.Context, ref string, how pullFlags) (imageRow, error)
	removeImage(ctx context.Context, ref string) (wire.ImageRemoved, error)
	// log writes the console of a VM: its last lines, or all if lines is negative.
	log(ctx context.Context, name string, o logOptions, w io.Writer) error
	events(ctx context.Context, o eventOptions, give func(events.Event) error) error
	// guest connects to a VM, and wakes it first.
	guest(ctx context.Context, name string) (inGuest, error)
	cp(ctx context.Context, src, dst vmPath, o copyOptions) (any, error)
	forward(ctx context.Context, name string, o forwardOptions) error
	volumes(context.Context) ([]volumeInfo, error)
	volume(ctx context.Context, name string) (volumeInfo, error)
	createVolume(ctx context.Context, name string, mib int64) (volumeDoc, error)
	resizeVolume(ctx context.Context, name string, mib int64) (volumeDoc, error)
	RemoveVolume(ctx context.Context, name string) error
	templates(context.Context) ([]templateInfo, error)
	// makeTemplate makes the template of a VM, or without one those that VMs have asked for.
	makeTemplate(context.Context, *wire.TemplateSpec) ([]templateDoc, error)
	// removeTemplate returns the key of the template that a word names.
	removeTemplate(ctx context.Context, word string) (key string, err error)
	inspectSnapshot(ctx context.Context, id string) (any, error)
	exportSnapshot(ctx context.Context, id string, w io.Writer) error
	importSnapshot(ctx context.Context, r io.Reader, trust bool) (wire.Imported, error)
	image(ctx context.Context, ref string) (json.RawMessage, error)
	// exportImage tells moved of its progress, if that is known.
	exportImage(ctx context.Context, ref, format string, w io.Writer, moved func(done, total int64)) (id string, err error)
	info(context.Context) (infoDoc, error)
	// awake wakes a VM that sleeps.
	awake(ctx context.Context, name string) error
	vm(name string) handle
}

// handle is a VM by its name, which need not exist. Exported methods are those of client.Sandbox or sandbox.Sandbox.
type handle interface {
	Inspect(context.Context) (json.RawMessage, error)
	Secrets(context.Context) ([]spec.SecretState, error)
	SetSecrets(context.Context, ...spec.Secret) error
	RemoveSecrets(ctx context.Context, names ...string) error
	Services(context.Context) ([]records.Service, error)
	SetService(context.Context, wire.SetService) (records.Service, error)
	RemoveService(ctx context.Context, service string) error
	StartService(ctx context.Context, service string, restart bool) (records.Service, error)
	StopService(ctx context.Context, service string) (records.Service, error)
	// WaitService also returns what is known of a service that does not become ready.
	WaitService(ctx context.Context, service string) (records.Service, error)
	ServiceLog(ctx context.Context, service string, w io.Writer, follow bool) error
	Diff(ctx context.Context, limit int, f func(wire.Diff) error) error
	Network(context.Context) (spec.NetworkStats, error)
	NetworkEvents(ctx context.Context, follow bool, f func(spec.NetEvent) error) error
	flows(ctx context.Context, follow bool, f func(netpolicy.FlowRecord) error) error
	audit(context.Context, auditOptions, func(audit.Entry) error) (audit.Trailer, error)
	watch(context.Context, watchOptions, func(wire.FileEvent) error) error
}

// cameUp says of a VM that it runs.
type cameUp struct {
	name    string
	hooks   []report.HookFailure
	network *spec.NetworkInfo
	doc     any                             // for JSON
	with    func(command execDoc) (doc any) // the same, with the result of a command
}

// MarshalJSON returns the document.
func (c cameUp) MarshalJSON() ([]byte, error) { return json.Marshal(c.doc) }

type cloneOptions struct {
	name   string
	policy *netpolicy.Policy
	idle   *spec.Idle
}

type forkOptions struct {
	count  int
	name   string
	early  bool
	policy *netpolicy.Policy
}

// forked is what a fork has made.
type forked struct {
	children []cameUp
	problem  string
	doc      any
}
