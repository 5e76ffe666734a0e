package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// otherVerbs says of commands that drowse does not have, as docker's, what to use instead.
var otherVerbs = map[string]string{
	"build":     "use `drowse image build --file Drowsefile --tag NAME`",
	"commit":    "use `drowse snapshot NAME`, which has the memory too, and `drowse restore`",
	"compose":   "use `drowse run` for each VM, and tags (`drowse policy`) for what may reach what",
	"container": "leave the word out: `drowse ls`, `drowse inspect NAME`, `drowse prune`",
	"create":    "use `drowse run -d`, which boots at once; `drowse sleep` costs only disk",
	"export":    "use `drowse snapshot export`, or `drowse cp NAME:/ DIR`",
	"import":    "use `drowse image build --from tar:FILE --tag NAME`",
	"load":      "use `drowse image build --from docker-archive:FILE`",
	"login":     "drowse uses docker's credentials: `docker login`, or $DOCKER_CONFIG",
	"logout":    "drowse uses docker's credentials: `docker logout`",
	"network":   "use --net, --allow and --tag of `drowse run`, and `drowse policy`",
	"pause":     "use `drowse sleep NAME`, which frees memory and CPU",
	"push":      "use `drowse image export NAME FILE --format oci-archive`, and a tool that pushes it",
	"restart":   "use `drowse stop NAME && drowse start NAME`",
	"save":      "use `drowse image export NAME FILE --format oci-archive`",
	"search":    "look at the registry; `drowse pull NAME` takes it",
	"swarm":     "use `drowse serve --cluster` on each host",
	"system":    "leave the word out: `drowse df`, `drowse info`, `drowse events`, `drowse prune`",
	"tag":       "use `drowse image build --from SOURCE --tag NAME`, which reuses an image that exists",
	"unpause":   "use `drowse wake NAME`",
	"wait":      "use `drowse attach NAME`, which ends with the command, or `drowse events`",
}

// otherFlags says the same of flags of docker's run, exec and others.
var otherFlags = map[string]string{
	"a": "it is always attached to stdout and stderr; -i adds stdin", "attach": "it is always attached to stdout and stderr; -i adds stdin",
	"add-host":  "write it into /etc/hosts, or use --policy with dns",
	"cap-add":   "leave it out: root in a VM has a kernel of its own",
	"cap-drop":  "use --user: what is root in a VM is nothing on the host",
	"cidfile":   "use -d, which prints the name, or --name",
	"cgroupns":  "leave it out: a VM has a kernel of its own",
	"cpu-quota": "use --cpus", "cpu-shares": "use --cpus", "cpuset-cpus": "use --cpus",
	"device": "a VM has no devices of the host: use --volume, --share or --allow",
	"dns":    "use --policy with dns",
	"expose": "leave it out: --publish needs no such hint",
	"format": "use -o json",
	"gpus":   "a VM has no devices of the host",
	"health": "use `drowse service set --ready`", "health-cmd": "use `drowse service set --ready`",
	"init": "leave it out: a VM has an init that reaps",
	"ip":   "leave it out: `drowse inspect` shows the address; --tag names VMs for each other",
	"ipc":  "leave it out: a VM has a kernel of its own", "pid": "leave it out: a VM has a kernel of its own", "uts": "leave it out: a VM has a kernel of its own", "userns": "leave it out: a VM has a kernel of its own",
	"l": "use --tag", "label": "use --tag",
	"link":       "use --tag, and a policy with agents on both sides",
	"log-driver": "leave it out: `drowse logs` and `drowse service logs` have the output", "log-opt": "leave it out: `drowse logs` and `drowse service logs` have the output",
	"memory-swap": "leave it out: use --memory", "memory-reservation": "leave it out: use --memory", "oom-kill-disable": "leave it out: use --memory",
	"mount": "use --volume NAME:/PATH, or --volume /HOSTDIR:/PATH[:ro]",
	"P":     "use --publish PORT:GUESTPORT for each port", "publish-all": "use --publish PORT:GUESTPORT for each port",
	"platform":   "leave it out: VMs run images of this host's architecture",
	"privileged": "leave it out: root in a VM has a kernel of its own",
	"q":          "leave it out: stdout has only what was asked for", "quiet": "leave it out: stdout has only what was asked for",
	"read-only":    "leave it out: --drop and `drowse restore` undo what was written",
	"restart":      "use `drowse service set NAME main COMMAND`, which restarts it",
	"since":        "the console has no times of day: use --tail, or `drowse events`",
	"security-opt": "leave it out: a VM has a kernel of its own", "group-add": "use --user USER:GROUP",
	"shm-size": "use --memory: /dev/shm is half of it", "tmpfs": "mount it in the VM: root may",
	"sig-proxy":   "leave it out: signals always go to the command",
	"stop-signal": "use `drowse kill -s`", "stop-timeout": "use `drowse stop --timeout`", "t": "use --timeout", "time": "use --timeout",
	"sysctl": "set it in the VM: root may", "ulimit": "set it in the VM: root may",
	"volumes-from": "name each by --volume",
}

// unknownFlag adds to the error of a flag that does not exist what to use instead.
func unknownFlag(cmd *cobra.Command, err error) error {
	var no *pflag.NotExistError
	if !errors.As(err, &no) {
		return err
	}
	name := no.GetSpecifiedName()
	if hint := otherFlags[name]; hint != "" {
		return fmt.Errorf("%w: %s", err, hint)
	}
	var all []string
	collect := func(f *pflag.Flag) { all = append(all, f.Name) }
	cmd.Flags().VisitAll(collect)
	cmd.InheritedFlags().VisitAll(collect)
	if like := closest(name, all); like != "" && len(name) > 1 {
		return fmt.Errorf("%w: did you mean --%s?", err, like)
	}
	return fmt.Errorf("%w: see `%s --help`", err, cmd.CommandPath())
}

// unknownVerb checks that a command that has only subcommands was given none that does not exist.
func unknownVerb(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	err := fmt.Errorf("unknown command %q for %q", args[0], cmd.CommandPath())
	if hint := otherVerbs[args[0]]; hint != "" && !cmd.HasParent() {
		return fmt.Errorf("%w: %s", err, hint)
	}
	var all []string
	for _, c := range cmd.Commands() {
		if !c.Hidden {
			all = append(all, c.Name())
		}
	}
	if like := closest(args[0], all); like != "" {
		return fmt.Errorf("%w: did you mean `%s %s`?", err, cmd.CommandPath(), like)
	}
	return err
}

// unknownWord returns the first word of a command line if it names no command: its flags need not be known then.
func unknownWord(root *cobra.Command, args []string) (word string, ok bool) {
	if c, _, _ := root.Find(args); c != root {
		return "", false
	}
	for i := 0; i < len(args); i++ {
		switch {
		case args[i] == "--state" || args[i] == "-o" || args[i] == "--output":
			i++
		case !strings.HasPrefix(args[i], "-"):
			// Cobra adds its own commands later.
			return args[i], args[i] != "help" && args[i] != "completion" && !strings.HasPrefix(args[i], "__")
		}
	}
	return "", false
}

// suggest returns a question about what the user may have meant where a name was not found, or "".
func (a *app) suggest(cmd *cobra.Command, err error) string {
	var all []string
	switch {
	case cmd == nil:
		return ""
	case errors.Is(err, spec.ErrNotFound):
		if p, perr := a.place(); perr == nil {
			list, _ := allOf(cmd.Context(), p, records.Filter{})
			for _, b := range list.Sandboxes {
				all = append(all, b.Name)
			}
		}
	case isMissingImage(err):
		if p, perr := a.place(); perr == nil {
			list, _ := p.images(cmd.Context())
			for _, i := range list {
				for _, t := range i.Tags {
					all = append(all, t, strings.TrimSuffix(t, ":latest"))
				}
			}
		}
	}
	var is []string
	for _, word := range cmd.Flags().Args() {
		word = splitVM(word).orName()
		if slices.Contains(all, word) {
			continue
		}
		if like := closest(word, all); like != "" && !slices.Contains(is, like) {
			is = append(is, like)
		}
	}
	if len(is) == 0 {
		return ""
	}
	return ": did you mean " + strings.Join(is, ", ") + "?"
}

// orName returns the VM of NAME:PATH, or the whole word.
func (p vmPath) orName() string {
	if p.vm != "" && strings.HasPrefix(p.path, "/") {
		return p.vm
	}
	if p.vm != "" {
		return p.vm + ":" + p.path
	}
	return p.path
}

// maxTypos is how many letters a suggestion may differ by, and maxWord the longest word that has one.
const maxTypos, maxWord = 2, 64

// closest returns the word that is like w, or "" if none is.
func closest(w string, all []string) string {
	best, found := maxTypos+1, ""
	for _, c := range all {
		if len(w) > maxWord || len(c) > maxWord {
			continue
		}
		if d := distance(w, c); d < best && d < max(len(w), len(c)) {
			best, found = d, c
		}
	}
	return found
}

// distance counts the letters to insert, delete, replace or exchange with the next (optimal string alignment).
func distance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			rows[i][j] = min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}

// errorDoc is an error with -o json.
type errorDoc struct {
	Error struct {
		Code    string `json:"code"`
		Message string `json:"message"`
		Remedy  string `json:"remedy,omitempty"`
	} `json:"error"`
}

// codeUsage is the code of a wrong command line.
const codeUsage = "usage"

// describe makes the document of an error. The remedy is what the message ends with, if that says what to do.
func describe(err error, message string, usage bool) (d errorDoc) {
	d.Error.Code, d.Error.Message = errorCode(err), message
	switch {
	case usage:
		d.Error.Code = codeUsage
	case d.Error.Code == "":
		d.Error.Code = "error"
	}
	for _, mark := range []string{": use ", ": see ", ": give ", ": name ", ": did you mean ", ": leave ", ": remove ", ": build ", ": wake ", ": start ", "; list "} {
		if i := strings.LastIndex(message, mark); i >= 0 && len(message)-i > len(d.Error.Remedy) {
			d.Error.Remedy = message[i+2:]
		}
	}
	return d
}

// wantsJSON reports whether a command line asks for JSON, also if it could not be read to its end.
func wantsJSON(args []string) bool {
	for i, w := range args {
		switch {
		case w == "--":
			return false
		case w == "-ojson", w == "--output=json", w == "-o=json":
			return true
		case (w == "-o" || w == "--output") && i+1 < len(args) && args[i+1] == "json":
			return true
		}
	}
	return false
}
