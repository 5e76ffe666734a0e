package fleet

import (
	"context"
	"errors"
	"strings"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
)

// remedies say what to do about an error, by code.
var remedies = map[records.Code]string{
	"not-found":          "list what there is, with Fleet.List",
	"exists":             "choose another name, or use GetOrCreate",
	"running":            "put it to sleep or stop it first",
	"not-running":        "start it",
	"expired":            "extend it",
	"metadata":           "give it metadata that is allowed",
	"invalid":            "ask for something that is possible",
	"hooks":              "see what its hooks say, or put it to sleep with other hook policy",
	"host-hooks":         "see what the hooks of the host say, or put it to sleep with other hook policy",
	"promote":            "see the cause, or put it to sleep with hook policy ignore: what is not promoted is not dropped then",
	"drop":               "see the cause, or put it to sleep with hook policy ignore",
	"persist-limit":      "remove files in it, or allow more",
	"no-space":           "free space, for one with Fleet.Prune, and try again",
	"no-kvm":             "see `drowse doctor`",
	"no-permission":      "run as root",
	"host-memory":        "put others to sleep, or give it less memory",
	"owner-limit":        "put to sleep or remove some of the owner's sandboxes or snapshots, or raise the limit with Limits.Write",
	"elsewhere":          "ask that host, or put it to sleep there",
	"unreachable":        "try again: when its host is dead, another one takes the sandbox within half a minute",
	"unclaimed":          "ask `drowse serve --cluster` for it",
	"target":             "see the cause, or name another host: see `drowse ls` for hosts that have sandboxes",
	"no-key":             "use it on a host that has the key, or add the key to the file that `keys` in the bucket's URL names here",
	"arriving":           "try again later; see that `drowse serve --cluster` runs and reaches the store",
	"snapshot-not-found": "list what there is, with Store.Snapshots",
	"snapshot-exists":    "use the one that is there, or remove it first",
	"snapshot-in-use":    "let the sandbox sleep again, or remove it",
	"foreign-snapshot":   "make a sandbox of its own from it, with Host.Clone",
	"corrupt":            "go back to an earlier snapshot, or boot it with its disk as it is",
	"record":             "restore its vm.json from a backup, or remove it with force",
	"volume-stale":       "boot it instead of waking it",
	"share-unusable":     "put the shared directory where it was, or name another one",
	"crashed":            "see its log (Store.ProcessLog), and start it",
	"policy":             "see docs/guides/policy.md, or check it with netpolicy.Parse",
	"policy-kernel":      "see `drowse doctor`",
	"not-a-kernel":       "name a kernel of kernel.List",
	"no-room":            "give it more memory",
	"incomplete":         "go back to an earlier snapshot, or boot it with its disk as it is",
	"version":            "use the version of drowse that has written it, or boot it with its disk as it is",
	"foreign":            "wake it on the kind of host that it slept on, or boot it with its disk as it is",
	"disk-in-use":        "wait until what uses it has ended, or see what that is with Host.List",
	"disk-only":          "make a sandbox from it that boots",
	"secrets":            "see docs/guides/secrets.md for what a guest can be given",
	"address-range":      "name another range of addresses with DROWSE_AGENT_RANGE",
	"addresses-full":     "remove sandboxes with a network, or name a larger range with DROWSE_AGENT_RANGE",
	"volume-not-found":   "list what there is, with Store.Volumes, or make it",
	"volume-in-use":      "put to sleep or stop what uses it",
	"volume-dirty":       "start the sandbox that had it, and stop it, so that it is unmounted",
	"not-frozen":         "try again when the guest does less",
	"ended":              "see what its guest has said (Store.ConsoleLog), and start it",
	"stopped":            "start it",
	"image-not-found":    "list what there is (image.List), or build it",
	"image-ambiguous":    "give more of its id, or a tag",
	"image-truncated":    "build or import it again",
	"image-corrupt":      "build or import it again",
	"kernel-not-found":   "list what there is (kernel.List), or get one (kernel.Build)",
	"kernel-feature":     "build a kernel that has it (kernel.Build)",
	"kernel-damaged":     "remove it, and build or fetch it again",
	"volume-read-only":   "mount it for writing",
	"volume-record":      "restore its volume.json from a backup",
	"volume-sync":        "see the host's log for errors of its disk",
	"snapshot-foreign":   "list what can be used, with Store.Snapshots",
	"disk-no-space":      "free space, for one with Fleet.Prune, and try again",
	"disk-corrupt":       "go back to an earlier snapshot",
	"disk-truncated":     "go back to an earlier snapshot",
	"disk-version":       "use the version of drowse that has written it",
	"disk-parent":        "go back to an earlier snapshot",
	"disk-sync":          "see the host's log for errors of its disk",
	"disk-io":            "see the host's log for errors of its disk",
	"network-busy":       "wait until what uses its network has ended",
	"network-full":       "remove sandboxes with a network",
	"network-pins":       "see `drowse doctor`",
	"network-nat":        "see `drowse doctor`",
	"not-recorded":       "see that the state directory can be written to",
	"guest-too-old":      "boot it anew, with the agent of this version",
	"guest-invalid":      "see what the guest has: its users, directories and programs",
	"guest-full":         "wait until some of what runs in it has ended",
	"guest-unavailable":  "see its console (Store.ConsoleLog); if it does not come back, start it anew",
	"guest-lost":         "see whether it still runs, and try again",
	"guest-protocol":     "boot it anew: what answers in it is not drowse's agent, or broken",
	"guest-limit":        "ask for less",
	"guest-unsafe":       "see what is in that directory of the guest",
	"guest-failed":       "see the cause, which is the guest's",
	records.CodeCanceled: "try again: what had begun can be repeated",
	records.CodeTimeout:  "try again with more time: what had begun can be repeated",
}

// Fail returns the error of an operation that other packages do on the VMs of a Fleet. It returns nil for nil, and
// an *Error unchanged.
func Fail(op, name string, err error) error { return fail(op, name, err) }

// fail returns the error of an operation.
func fail(op, name string, err error) error {
	if err == nil {
		return nil
	}
	var have *records.Error
	if errors.As(err, &have) {
		return err
	}
	code := CodeOf(err)
	return &records.Error{Op: op, Sandbox: name, Code: code, Remedy: remedies[code], Err: err}
}

// CodeOf returns the code of any error.
func CodeOf(err error) records.Code {
	var have *records.Error
	switch {
	case errors.As(err, &have):
		return have.Code
	case errors.Is(err, records.ErrInvalid):
		return "invalid"
	case errors.Is(err, lifetime.ErrKeep):
		return "metadata"
	}
	// A guest that does not answer says less than a deadline that has passed.
	code := control.ErrorCode(err)
	if code != "" && (!strings.HasPrefix(code, "guest-") || !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled)) {
		return records.Code(code)
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return records.CodeTimeout
	case errors.Is(err, context.Canceled):
		return records.CodeCanceled
	}
	return records.CodeOther
}
