package api_test

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm"
	"github.com/drowse-vm/drowse/vmm/boot"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// answered is how an answer reports an error. never says why no answer has it, or only within another one.
type answered struct {
	err    error
	code   records.Code
	status int
	never  string
}

func never(why string) answered { return answered{never: why} }

const (
	builds   = "the API builds no images and kernels"
	copies   = "the API copies no files; those that are promoted fail with ErrPromote"
	asks     = "it is told to the guest that has asked"
	volumes  = "the API makes and changes no volumes"
	attaches = "the API attaches to no process"
	internal = "it is a mistake of the program's, and 500"
)

// sentinels has all exported errors of the packages that the server is made of.
var sentinels = map[string]answered{
	"spec.ErrNotFound":           {sandbox.ErrNotFound, "not-found", 404, ""},
	"spec.ErrExists":             {sandbox.ErrExists, "exists", 409, ""},
	"spec.ErrNotRunning":         {sandbox.ErrNotRunning, "not-running", 409, ""},
	"spec.ErrRunning":            {sandbox.ErrRunning, "running", 409, ""},
	"spec.ErrCrashed":            {spec.ErrCrashed, "crashed", 409, ""},
	"control.ErrStopped":         {control.ErrStopped, "stopped", 409, ""},
	"spec.ErrRecord":             {spec.ErrRecord, "record", 500, ""},
	"spec.ErrInvalid":            {sandbox.ErrSpec, "invalid", 400, ""},
	"spec.ErrMetadata":           {spec.ErrMetadata, "metadata", 400, ""},
	"spec.ErrExpired":            {spec.ErrExpired, "expired", 409, ""},
	"spec.ErrHooks":              {spec.ErrHooks, "hooks", 409, ""},
	"spec.ErrHostHooks":          {spec.ErrHostHooks, "host-hooks", 409, ""},
	"spec.ErrPromote":            {spec.ErrPromote, "promote", 409, ""},
	"spec.ErrDrop":               {spec.ErrDrop, "drop", 409, ""},
	"spec.ErrQuota":              {spec.ErrQuota, "owner-limit", 429, ""},
	"spec.ErrUnreachable":        {spec.ErrUnreachable, "unreachable", 503, ""},
	"spec.ErrElsewhere":          {spec.ErrElsewhere, "elsewhere", 409, ""},
	"spec.ErrUnclaimed":          {spec.ErrUnclaimed, "unclaimed", 409, ""},
	"spec.ErrNoKey":              {spec.ErrNoKey, "no-key", 409, ""},
	"spec.ErrArriving":           {spec.ErrArriving, "arriving", 409, ""},
	"spec.ErrTarget":             {spec.ErrTarget, "target", 409, ""},
	"spec.ErrPersistLimit":       {spec.ErrPersistLimit, "persist-limit", 409, ""},
	"spec.ErrSecrets":            {spec.ErrSecrets, "secrets", 409, ""},
	"spec.ErrShare":              {spec.ErrShare, "share-unusable", 409, ""},
	"spec.ErrDiskOnly":           {spec.ErrDiskOnly, "disk-only", 409, ""},
	"spec.ErrForeignSnapshot":    {spec.ErrForeignSnapshot, "foreign-snapshot", 409, ""},
	"spec.ErrSnapshotInUse":      {spec.ErrSnapshotInUse, "snapshot-in-use", 409, ""},
	"image.ErrNoEntrypoint":      never("a request that runs a command says which"),
	"state.ErrImport":            never("the API imports nothing"),
	"control.ErrCanceled":        never("who would get it does not wait any more"),
	"control.ErrForkEnded":       never("a fork says by its result that its snapshot is not on disk"),
	"state.ErrBetween":           never("who gets it looks again"),
	"state.ErrNothingToTell":     never("a change of metadata ends with it that is none"),
	"state.ErrStoreBusy":         never("it waits for a sweep, which ends; a request that gives up says how long it waited"),
	"spec.ErrServed":             never("one pool is served, before requests are answered"),
	"control.ErrServiceNotReady": never("waiting for a service has another code for it"),
	"state.ErrNoForker":          never(asks),
	"state.ErrOwnersTimer":       never(asks),
	"state.ErrExtension":         never(asks),
	"control.ErrSelfLimit":       never(asks),

	"lifetime.ErrKeep":   {lifetime.ErrKeep, "metadata", 400, ""},
	"records.ErrInvalid": {records.ErrInvalid, "invalid", 400, ""},

	"image.ErrNotFound":          {image.ErrNotFound, "image-not-found", 404, ""},
	"image.ErrAmbiguous":         {image.ErrAmbiguous, "image-ambiguous", 400, ""},
	"image.ErrTruncated":         {image.ErrTruncated, "image-truncated", 500, ""},
	"image.ErrCorrupt":           {image.ErrCorrupt, "image-corrupt", 500, ""},
	"image.ErrInUse":             never("the API removes no images"),
	"image.ErrUnsupportedSource": never(builds),
	"image.ErrInvalidOption":     never(builds),
	"image.ErrToolMissing":       never(builds),
	"image.ErrNotRoot":           never(builds),
	"image.ErrNoMirror":          never(builds),
	"image.ErrBuildTool":         never(builds),
	"image.ErrTooLarge":          never(builds),
	"image.ErrChanged":           never(builds),
	"image.ErrBadArchive":        never(builds),
	"image.ErrDigest":            never(builds),
	"image.ErrBadManifest":       never(builds),
	"image.ErrNoPlatform":        never(builds),
	"image.ErrNoSource":          never(builds),
	"image.ErrAuth":              never(builds),
	"image.ErrRateLimited":       never(builds),
	"image.ErrRegistry":          never(builds),

	"kernel.ErrNotFound":    {kernel.ErrNotFound, "kernel-not-found", 404, ""},
	"kernel.ErrFeature":     {kernel.ErrFeature, "kernel-feature", 409, ""},
	"kernel.ErrDamaged":     {kernel.ErrDamaged, "kernel-damaged", 500, ""},
	"kernel.ErrUnsupported": never(builds),
	"kernel.ErrNoPackage":   never(builds),
	"boot.ErrNotKernel":     {boot.ErrNotKernel, "not-a-kernel", 400, ""},
	"boot.ErrNoRoom":        {boot.ErrNoRoom, "no-room", 400, ""},

	"volume.ErrNotFound":   {volume.ErrNotFound, "volume-not-found", 404, ""},
	"volume.ErrInUse":      {volume.ErrInUse, "volume-in-use", 409, ""},
	"volume.ErrStale":      {volume.ErrStale, "volume-stale", 409, ""},
	"volume.ErrDirty":      {volume.ErrDirty, "volume-dirty", 409, ""},
	"volume.ErrReadOnly":   {volume.ErrReadOnly, "volume-read-only", 409, ""},
	"volume.ErrRecord":     {volume.ErrRecord, "volume-record", 500, ""},
	"volume.ErrSyncFailed": {volume.ErrSyncFailed, "volume-sync", 500, ""},
	"volume.ErrName":       never("a sandbox with such a volume is ErrSpec"),
	"volume.ErrExists":     never(volumes),
	"volume.ErrSize":       never(volumes),
	"volume.ErrNoSpace":    never(volumes),

	"snapshot.ErrNotFound":   {snapshot.ErrNotFound, "snapshot-not-found", 404, ""},
	"snapshot.ErrForeign":    {snapshot.ErrForeign, "snapshot-foreign", 409, ""},
	"snapshot.ErrVersion":    {snapshot.ErrVersion, "version", 409, ""},
	"snapshot.ErrIncomplete": {snapshot.ErrIncomplete, "incomplete", 500, ""},
	"snapshot.ErrCorrupt":    {snapshot.ErrCorrupt, "corrupt", 500, ""},
	"snapshot.ErrNoSpace":    {snapshot.ErrNoSpace, "no-space", 507, ""},
	"snapshot.ErrExists":     never("new snapshots have random names"),
	"snapshot.ErrBase":       never(internal),
	"snapshot.ErrSpec":       never(internal),

	"disk.ErrInUse":         {disk.ErrInUse, "disk-in-use", 409, ""},
	"disk.ErrNoSpace":       {disk.ErrNoSpace, "disk-no-space", 507, ""},
	"disk.ErrVersion":       {disk.ErrVersion, "disk-version", 409, ""},
	"disk.ErrCorrupt":       {disk.ErrCorrupt, "disk-corrupt", 500, ""},
	"disk.ErrTruncated":     {disk.ErrTruncated, "disk-truncated", 500, ""},
	"disk.ErrMissingParent": {disk.ErrMissingParent, "disk-parent", 500, ""},
	"disk.ErrIO":            {disk.ErrIO, "disk-io", 500, ""},
	"disk.ErrSyncFailed":    {disk.ErrSyncFailed, "disk-sync", 500, ""},
	"disk.ErrMerging":       never("an interrupted merge is repeated when the disk is opened"),
	"disk.ErrDamaged":       never("the API reads no file systems"),
	"disk.ErrSize":          never("a sandbox with such a disk is ErrSpec"),
	"disk.ErrReadOnly":      never(internal),
	"disk.ErrSealed":        never(internal),
	"disk.ErrRange":         never(internal),
	"disk.ErrClosed":        never(internal),
	"disk.ErrTooManyLayers": never(internal),

	"guest.ErrInvalid":        {guest.ErrInvalid, "guest-invalid", 400, ""},
	"guest.ErrFull":           {guest.ErrFull, "guest-full", 503, ""},
	"guest.ErrUnavailable":    {guest.ErrUnavailable, "guest-unavailable", 503, ""},
	"guest.ErrConnectionLost": {guest.ErrConnectionLost, "guest-lost", 502, ""},
	"guest.ErrProtocol":       {guest.ErrProtocol, "guest-protocol", 502, ""},
	"guest.ErrLimit":          {guest.ErrLimit, "guest-limit", 502, ""},
	"guest.ErrUnsafe":         {guest.ErrUnsafe, "guest-unsafe", 502, ""},
	"guest.ErrRemote":         {guest.ErrRemote, "guest-failed", 502, ""},
	"guest.ErrNoStats":        {guest.ErrNoStats, "guest-too-old", 409, ""},
	"guest.ErrFrozenTooLong":  {guest.ErrFrozenTooLong, "not-frozen", 409, ""},
	"guest.ErrNotRecorded":    {guest.ErrNotRecorded, "not-recorded", 500, ""},
	"guest.ErrNotFound":       never(attaches),
	"guest.ErrNotRunning":     never(attaches),
	"guest.ErrTakenOver":      never(attaches),
	"guest.ErrNoResume":       never(copies),
	"guest.ErrPromoteDir":     never(copies),
	"guest.ErrNotPromotable":  never(copies),
	"guest.ErrNoDrop":         never("it is in an ErrDrop"),
	"audit.ErrTrail":          {audit.ErrTrail, "not-recorded", 500, ""},
	"audit.ErrNone":           never("the API reads no trails"),
	"audit.ErrDamaged":        never("the API reads no trails"),

	"netpolicy.ErrPolicy":   {netpolicy.ErrPolicy, "policy", 400, ""},
	"link.ErrKernel":        {link.ErrKernel, "policy-kernel", 503, ""},
	"link.ErrSlots":         {link.ErrSlots, "network-full", 503, ""},
	"link.ErrBusy":          {link.ErrBusy, "network-busy", 409, ""},
	"link.ErrRoot":          {link.ErrRoot, "network-pins", 503, ""},
	"link.ErrUp":            never(internal),
	"link.ErrGone":          never("the VM ends then"),
	"link.ErrName":          never("names of sandboxes are names of agents"),
	"netpolicy.ErrIdentity": never("tags are checked before: ErrMetadata, ErrSpec"),
	"link.ErrPinsFull":      never("a guest's name server says it to the guest"),
	"flow.ErrNoFlow":        never("only what checks names in TLS asks for it"),
	"hostnet.ErrRange":      {hostnet.ErrRange, "address-range", 503, ""},
	"hostnet.ErrFull":       {hostnet.ErrFull, "addresses-full", 503, ""},
	"hostnet.ErrNAT":        {hostnet.ErrNAT, "network-nat", 503, ""},

	"vmm.ErrHostMemory":   {vmm.ErrHostMemory, "host-memory", 503, ""},
	"vmm.ErrForeign":      {vmm.ErrForeign, "foreign", 409, ""},
	"vmm.ErrEnded":        {vmm.ErrEnded, "ended", 409, ""},
	"vmm.ErrConfig":       never("what a user can say is ErrSpec; else " + internal),
	"vmm.ErrNotPaused":    never(internal),
	"vmm.ErrNotTracked":   never(internal),
	"kvm.ErrNoKVM":        {kvm.ErrNoKVM, "no-kvm", 503, ""},
	"kvm.ErrNoPermission": {kvm.ErrNoPermission, "no-permission", 503, ""},
	"kvm.ErrState":        never("a snapshot with such a state is ErrCorrupt or ErrForeign"),
}

// sources are the directories of these packages, from the root of the repository.
var sources = []string{
	"sandbox", "sandbox/spec", "sandbox/state", "sandbox/control", "sandbox/process", "sandbox/pool", "sandbox/fleet", "sandbox/lifetime", "sandbox/records", "rootfs/image", "rootfs/kernel", "rootfs/volume", "rootfs/disk", "snapshot",
	"guest", "guest/audit", "netpolicy", "netpolicy/link", "netpolicy/flow", "netpolicy/hostnet", "vmm", "vmm/kvm", "vmm/boot",
}

// exported returns the names of the errors that these packages export, as package.ErrName.
func exported(t *testing.T) (names []string) {
	t.Helper()
	isErr := regexp.MustCompile(`^Err[A-Z]`)
	for _, dir := range sources {
		files, err := fs.Glob(os.DirFS(filepath.Join("../..", dir)), "*.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(token.NewFileSet(), filepath.Join("../..", dir, name), nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range f.Decls {
				g, ok := d.(*ast.GenDecl)
				if !ok || g.Tok != token.VAR {
					continue
				}
				for _, s := range g.Specs {
					for i, id := range s.(*ast.ValueSpec).Names {
						// An alias of an error of package spec does not count.
						alias := false
						if v := s.(*ast.ValueSpec); i < len(v.Values) {
							if of, ok := v.Values[i].(*ast.SelectorExpr); ok {
								alias = fmt.Sprint(of.X) == "spec"
							}
						}
						if isErr.MatchString(id.Name) && !alias {
							names = append(names, f.Name.Name+"."+id.Name)
						}
					}
				}
			}
		}
	}
	return names
}

func TestErrors_every_sentinel_has_a_status_a_code_and_a_remedy(t *testing.T) {
	names := exported(t)
	for _, name := range names {
		if _, ok := sentinels[name]; !ok {
			t.Errorf("%s is not in the table: give it a code in sandbox/spec/errors.go or sandbox/control/errors.go, a remedy in sandbox/fleet/errors.go and a status in sandbox/api/server.go, or say why it is in no answer", name)
		}
	}
	for name, want := range sentinels {
		if !slices.Contains(names, name) {
			t.Errorf("there is no %s", name)
		}
		if want.never != "" {
			continue
		}
		got := api.ErrorOf(fleet.Fail("create", "a", fmt.Errorf("doing it: %w", want.err)))
		if got.Code != want.code || api.StatusOf(got.Code) != want.status || got.Remedy == "" {
			t.Errorf("%s: code %q, status %d, remedy %q; want %q, %d and a remedy", name, got.Code, api.StatusOf(got.Code), got.Remedy, want.code, want.status)
		}
	}
	for _, full := range []error{unix.ENOSPC, unix.EDQUOT} {
		if got := api.ErrorOf(fleet.Fail("create", "a", &os.PathError{Op: "write", Path: "x", Err: full})); api.StatusOf(got.Code) != http.StatusInsufficientStorage || got.Remedy == "" {
			t.Errorf("%v: %+v", full, got)
		}
	}
}

// Requests ask an empty store for things that it does not have.
func TestAttack_request_for_what_is_not_there_is_the_servers_fault(t *testing.T) {
	dir, err := os.MkdirTemp("", "da") // short, since socket paths are limited
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // leftovers in /tmp must not fail a test
	store, err := sandbox.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	s := serve(t, func(o *api.Options) {
		o.Host = store.With(pool.Launcher{Command: []string{"/bin/false"}, Agent: "/bin/true"})
	})
	for name, row := range map[string]struct {
		method, path, body string
		status             int
		code               records.Code
	}{
		"an image":                {"POST", "/v1/sandboxes", `{"spec":{"image":"none"}}`, 404, "image-not-found"},
		"an image by its id":      {"POST", "/v1/sandboxes", `{"spec":{"image":"sha256:` + strings.Repeat("0", 64) + `"}}`, 404, "image-not-found"},
		"an image of no name":     {"POST", "/v1/sandboxes", `{"spec":{"image":"///"}}`, 404, "image-not-found"},
		"a volume":                {"POST", "/v1/sandboxes", `{"spec":{"image":"none","volumes":[{"name":"none","path":"/v"}]}}`, 404, "volume-not-found"},
		"a shared directory":      {"POST", "/v1/sandboxes", `{"spec":{"image":"none","shares":[{"source":"/none","path":"/s"}]}}`, 409, "share-unusable"},
		"a sandbox":               {"GET", "/v1/sandboxes/none", "", 404, "not-found"},
		"a sandbox to wake":       {"POST", "/v1/sandboxes/none/wake", "", 404, "not-found"},
		"a sandbox for a command": {"POST", "/v1/sandboxes/none/exec", `{"command":["true"]}`, 404, "not-found"},
		"a sandbox to fork":       {"POST", "/v1/sandboxes/none/fork", `{"children":[{}]}`, 404, "not-found"},
		"a sandbox's console":     {"GET", "/v1/sandboxes/none/console", "", 404, "not-found"},
		"a sandbox's policy":      {"GET", "/v1/sandboxes/none/policy", "", 404, "not-found"},
		"a sandbox's flows":       {"GET", "/v1/sandboxes/none/flows", "", 404, "not-found"},
		"a sandbox's numbers":     {"GET", "/v1/sandboxes/none/stats", "", 404, "not-found"},
		"a snapshot to tag":       {"POST", "/v1/snapshots/0123/tags", `{"tags":["a"]}`, 404, "snapshot-not-found"},
		"a snapshot to remove":    {"DELETE", "/v1/snapshots/0123", "", 404, "snapshot-not-found"},
	} {
		t.Run(name, func(t *testing.T) {
			var body any
			if row.body != "" {
				body = json.RawMessage(row.body)
			}
			resp, err := s.client.Do(t.Context(), row.method, row.path, body)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			var doc wire.ErrorDoc
			if err := json.NewDecoder(resp.Body).Decode(&doc); err != nil {
				t.Fatal(err)
			}
			e := doc.Error
			if resp.StatusCode != row.status || e.Code != row.code || e.Remedy == "" {
				t.Errorf("got %d, %+v; want %d, %s and a remedy", resp.StatusCode, e, row.status, row.code)
			}
		})
	}
}
