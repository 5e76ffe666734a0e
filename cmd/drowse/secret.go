package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

func (a *app) secretCommand() *cobra.Command {
	return group(&cobra.Command{
		Use: "secret", Short: "Give a VM secrets that are in none of its snapshots",
		Long: `Give a VM secrets. Programs in it find them as files in ` + spec.SecretsDir + `. The values are only in
the memory of the VM's process: not in its record, on its disk or in a snapshot. For secrets that
the proxy of the network policy puts into requests there are no files: programs have a
placeholder in a variable of that name (docs/guides/proxy.md).

Secrets are gone when the VM falls asleep or stops. After that, programs that open the files wait
until the secrets are set again, for a minute at most. Those with a source ("drowse secret source")
are set at each wake and boot. docs/guides/secrets.md has the details.`,
	}, append(a.secretVerbs(), a.secretSetCommand(), a.secretListCommand(), a.secretRemoveCommand())...)
}

func (a *app) secretSetCommand() *cobra.Command {
	var (
		mode     string
		uid, gid uint32
		once     bool
		proxy    bool
	)
	cmd := &cobra.Command{
		Use: "set NAME SECRET=@FILE|SECRET=-|SECRET=from:SOURCE...", Short: "Give secrets to a VM; a sleeping one is woken, unless all have sources",
		Args: cobra.MinimumNArgs(2), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			m, err := strconv.ParseUint(mode, 8, 16)
			if err != nil || m == 0 || m > 0o777 {
				return usageError{fmt.Errorf("--mode %q: use permissions in octal, 0001 to 0777", mode)}
			}
			list, err := readSecrets(args[1:], os.Stdin)
			if err != nil {
				return err
			}
			defer wipeSecrets(list)
			for i := range list {
				list[i].Transient, list[i].Proxy = once, proxy
				if !proxy {
					list[i].Mode, list[i].UID, list[i].GID = uint16(m), uid, gid
				}
			}
			if slices.ContainsFunc(list, func(l spec.Secret) bool { return l.From == "" || once }) {
				if err := p.awake(cmd.Context(), args[0]); err != nil {
					return err
				}
			}
			err = p.vm(args[0]).SetSecrets(cmd.Context(), list...)
			return a.answer(map[string]any{"name": args[0], "set": secretNames(list)}, err, func(io.Writer) {})
		}),
	}
	f := cmd.Flags()
	f.StringVar(&mode, "mode", strconv.FormatUint(spec.DefaultSecretMode, 8), "permissions of the files, in octal")
	f.Uint32Var(&uid, "uid", 0, "numeric owner of the files")
	f.Uint32Var(&gid, "gid", 0, "numeric group of the files")
	f.BoolVar(&proxy, "proxy", false, "for the VM's proxy only, without a file; always so for secrets that the network policy names")
	f.BoolVar(&once, "once", false, "do not wait for the secrets after a sleep or stop")
	return cmd
}

func (a *app) secretListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls NAME", Short: "List the secrets of a VM, without values", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			list, err := p.vm(args[0]).Secrets(cmd.Context())
			return answerList(a, list, err, "SECRET\tVALUE\tMODE\tOWNER\tAFTER A WAKE", func(l spec.SecretState) []any {
				value, after := "awaited", "gone"
				if l.Present {
					value = bytesText(int64(l.Size))
				}
				if l.Kept {
					after = "awaited"
				}
				if l.From != "" {
					after = "from " + l.From
				}
				mode, owner := fmt.Sprintf("%04o", cmp.Or(l.Mode, spec.DefaultSecretMode)), fmt.Sprintf("%d:%d", l.UID, l.GID)
				if l.Proxy {
					mode, owner = "proxy", "-"
				}
				return []any{l.Name, value, mode, owner, after}
			})
		}),
	}
}

func (a *app) secretRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME SECRET...", Short: "Remove secrets from a VM", Args: cobra.MinimumNArgs(2), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			err := p.vm(args[0]).RemoveSecrets(cmd.Context(), args[1:]...)
			return a.answer(map[string]any{"name": args[0], "removed": args[1:]}, err, func(io.Writer) {})
		}),
	}
}

// secretFlag adds --secret to a command.
func secretFlag(cmd *cobra.Command, to *[]string, more string) {
	cmd.Flags().StringArrayVar(to, "secret", nil, "NAME=@FILE, NAME=- for stdin, or NAME=from:SOURCE: give a secret"+more+"; repeatable")
}

// readSecrets reads NAME=@FILE, NAME=- and NAME=from:SOURCE. A value cannot stand on the command line, which every user
// of the host can see.
func readSecrets(words []string, stdin io.Reader) (list []spec.Secret, err error) {
	defer func() {
		if err != nil {
			wipeSecrets(list)
		}
	}()
	seen := map[string]bool{}
	for _, w := range words {
		name, from, ok := strings.Cut(w, "=")
		path, file := strings.CutPrefix(from, "@")
		source, referred := strings.CutPrefix(from, "from:")
		switch {
		case !ok || from != "-" && (!file || path == "") && (!referred || source == ""):
			return list, usageError{fmt.Errorf("secret %s: give it as NAME=@FILE, NAME=- for stdin, or NAME=from:SOURCE, and not by its value, which others could see", name)}
		case seen[name]:
			return list, usageError{fmt.Errorf("secret %s is given twice", name)}
		case from == "-" && seen["-"]:
			return list, usageError{errors.New("stdin can be one secret, not two")}
		}
		if err := spec.CheckSecretName(name); err != nil {
			return list, usageError{err}
		}
		seen[name] = true
		if referred {
			list = append(list, spec.Secret{SecretFile: spec.SecretFile{Name: name, From: source}})
			continue
		}
		in := stdin
		if from == "-" {
			seen["-"] = true
		} else {
			f, err := os.Open(path)
			if err != nil {
				return list, fmt.Errorf("reading secret %s: %w", name, err)
			}
			defer f.Close()
			in = f
		}
		value, err := readAtMost(in, spec.MaxSecret)
		list = append(list, spec.Secret{SecretFile: spec.SecretFile{Name: name}, Value: value})
		if err != nil {
			return list, fmt.Errorf("reading secret %s: %w", name, err)
		}
	}
	return list, nil
}

// readAtMost reads all of r into one buffer and leaves no copies behind. It reads at most limit+1 bytes.
func readAtMost(r io.Reader, limit int) ([]byte, error) {
	buf := make([]byte, limit+1)
	n, err := io.ReadFull(r, buf)
	switch {
	case err == nil:
		return buf, fmt.Errorf("it has more than %d bytes", limit)
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return buf[:n], nil
	}
	return buf, err
}

func wipeSecrets(list []spec.Secret) {
	for _, l := range list {
		clear(l.Value)
	}
}

func secretNames(list []spec.Secret) []string {
	names := []string{}
	for _, l := range list {
		names = append(names, l.Name)
	}
	return names
}

// handIn gives secrets to running VMs.
func handIn(ctx context.Context, p place, list []spec.Secret, names ...string) error {
	for _, name := range names {
		if _, err := give(ctx, p, name, list, false); err != nil {
			return err
		}
	}
	return nil
}

// give gives secrets to a running VM. Secrets that the VM has or awaits keep everything but their value. The
// others are transient or not, as the caller says. give returns their names.
func give(ctx context.Context, p place, name string, list []spec.Secret, transient bool) (others []string, err error) {
	if len(list) == 0 {
		return nil, nil
	}
	there, err := p.vm(name).Secrets(ctx)
	if err != nil {
		return nil, err
	}
	own, others := asTheyAre(list, there, transient)
	return others, p.vm(name).SetSecrets(ctx, own...)
}

// asTheyAre gives each secret the file and lifetime of the existing one of its name. The others are transient or
// not, as the caller says. It returns their names too.
func asTheyAre(list []spec.Secret, there []spec.SecretState, transient bool) (out []spec.Secret, others []string) {
	for _, l := range list {
		if i := slices.IndexFunc(there, func(t spec.SecretState) bool { return t.Name == l.Name }); i >= 0 {
			from := cmp.Or(l.From, there[i].From)
			l.SecretFile, l.Transient = there[i].SecretFile, !there[i].Kept
			l.From = from
		} else {
			l.Transient = transient
			others = append(others, l.Name)
		}
		out = append(out, l)
	}
	return out, others
}

// lendSecrets gives secrets to a running VM while a command runs. Secrets that the VM already has get the new
// value, and stay.
func lendSecrets(ctx context.Context, p place, name string, list []spec.Secret) (back func(), err error) {
	lent, err := give(ctx, p, name, list, true)
	return func() {
		for _, n := range lent {
			// One by one: a secret may have gone with a sleep meanwhile, or its VM may have ended.
			_ = p.vm(name).RemoveSecrets(context.WithoutCancel(ctx), n)
		}
	}, err
}
