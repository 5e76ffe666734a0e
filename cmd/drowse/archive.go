//go:build linux

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync/atomic"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/blob/s3"
	"github.com/drowse-vm/drowse/sandbox/blob/sealed"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// archiveVariable names the archive that commands use without --in.
const archiveVariable = "DROWSE_ARCHIVE"

func (a *app) archiveCommand() *cobra.Command {
	var in string
	cmd := &cobra.Command{
		Use: "archive", Short: "Keep snapshots in a bucket of S3 or a directory, for other hosts",
		Long: `Keep snapshots in an archive, from which any host can have them: a bucket,

    s3://BUCKET/PREFIX?endpoint=https://HOST&region=NAME&path-style=true&ca=FILE&keys=FILE

of Amazon (no endpoint) or of a server with conditional writes, or a directory, which must be of a
local file system. upload-mib=N and download-mib=N bound the network, in MiB a second. Credentials
come from where Amazon's programs take them: AWS_ACCESS_KEY_ID, ~/.aws, the role of the machine.
Name the archive with --in, or in ` + archiveVariable + `.

keys names a file, of mode 600, with a key of 64 hexadecimal digits ("openssl rand -hex 32") in
each line. drowse encrypts with the first one, and reads what any of them has encrypted. A key with
an owner behind it, after a space, is for the sandboxes of that owner that hosts share.

Whoever can write to an archive without keys can make snapshots of any content. With them, nobody
can, but the server can give back what was there before.`,
	}
	cmd.PersistentFlags().StringVar(&in, "in", os.Getenv(archiveVariable), "`ARCHIVE`: s3://BUCKET/PREFIX or a directory")
	opened := func(do func(cmd *cobra.Command, args []string, ar *archive.Archive) error) runE {
		return func(cmd *cobra.Command, args []string) error {
			ar, done, err := openArchive(in, cmd.Name() == "push")
			if err != nil {
				return err
			}
			defer done()
			return do(cmd, args, ar)
		}
	}
	var images bool
	kind := func() archive.Kind {
		if images {
			return archive.Images
		}
		return archive.Snapshots
	}
	ofImages := func(cmd *cobra.Command, what string) *cobra.Command {
		cmd.Flags().BoolVar(&images, "images", false, what)
		return cmd
	}
	cmd.AddCommand(
		&cobra.Command{
			Use: "push SNAPSHOT", Short: "Put a snapshot, with its disk and image, into the archive", Args: cobra.ExactArgs(1),
			RunE: opened(func(cmd *cobra.Command, args []string, ar *archive.Archive) error {
				return a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
					p := a.newProgress("archive push")
					info, err := ar.Push(cmd.Context(), s.State, args[0], copied(p))
					p.finish(err)
					return a.answer(info, err, func(w io.Writer) {
						fmt.Fprintf(w, "%s: %s, %s in the archive\n", info.ID, bytesText(info.Size), bytesText(info.Stored))
					})
				})(cmd, args)
			}),
		},
		a.archivePullCommand(opened),
		ofImages(&cobra.Command{
			Use: "ls", Short: "List what is in the archive", Args: cobra.NoArgs,
			RunE: opened(func(cmd *cobra.Command, _ []string, ar *archive.Archive) error {
				list, err := ar.List(cmd.Context(), kind())
				return answerList(a, list, err, "ID\tNAME\tIMAGE\tCREATED\tPUT\tSIZE\tSTORED", func(i archive.Info) []any {
					return []any{i.ID, i.Name, cmp.Or(i.Image[:min(len(i.Image), 12)], "-"), i.Created.Local().Format(daySecond), i.Put.Local().Format(daySecond), bytesText(i.Size), bytesText(i.Stored)}
				})
			}),
		}, "images instead of snapshots"),
		ofImages(&cobra.Command{
			Use: "rm ID...", Short: "Remove snapshots from the archive", Args: cobra.MinimumNArgs(1),
			RunE: opened(func(cmd *cobra.Command, args []string, ar *archive.Archive) error {
				for _, arg := range args {
					id, err := ar.Find(cmd.Context(), kind(), arg)
					if err == nil {
						err = ar.Remove(cmd.Context(), kind(), id)
					}
					if err := a.answer(map[string]string{"removed": id}, err, func(w io.Writer) { fmt.Fprintln(w, id) }); err != nil {
						return err
					}
				}
				return nil
			}),
		}, "images instead of snapshots: snapshots of them can then be pulled only where the image is"),
		&cobra.Command{
			Use: "sweep", Short: "Remove what is left of pushes that were interrupted more than a day ago", Args: cobra.NoArgs,
			RunE: opened(func(cmd *cobra.Command, _ []string, ar *archive.Archive) error {
				swept, err := ar.Sweep(cmd.Context())
				return a.answer(swept, err, func(w io.Writer) {
					fmt.Fprintf(w, "%d objects removed, %s\n", swept.Objects, bytesText(swept.Bytes))
				})
			}),
		},
	)
	return cmd
}

func (a *app) archivePullCommand(opened func(func(*cobra.Command, []string, *archive.Archive) error) runE) *cobra.Command {
	var o state.ImportOptions
	cmd := &cobra.Command{
		Use: "pull SNAPSHOT", Annotations: makesState, Short: "Make a snapshot of the archive in this store, with its image", Args: cobra.ExactArgs(1),
		Long: `Make a snapshot of the archive in this store, and its image if the store lacks that. "drowse
restore" makes a sandbox of it. What is not trusted of it, and --trust, are as for "drowse
snapshot import".`,
		RunE: opened(func(cmd *cobra.Command, args []string, ar *archive.Archive) error {
			return a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
				p := a.newProgress("archive pull")
				res, err := ar.Pull(cmd.Context(), s.State, args[0], o, copied(p))
				p.finish(err)
				return a.imported(wire.Imported(res), err)
			})(cmd, args)
		}),
	}
	cmd.Flags().BoolVar(&o.Trust, "trust", false, "also take policy, tags, grants, kernel and everything else about the VM")
	return cmd
}

// copied shows how many bytes were copied.
func copied(p *progress) archive.Progress {
	var done atomic.Int64
	return func(n int64) { p.report(stageCopy, done.Add(n), 0) }
}

// openArchive opens an archive. A directory that is missing is made, or is an error: a misspelt one would look empty.
func openArchive(in string, mayMake bool) (ar *archive.Archive, done func(), err error) {
	if in == "" {
		return nil, nil, usageError{fmt.Errorf("which archive: name it with --in, or in %s", archiveVariable)}
	}
	store, done, err := openBlobs(in, mayMake)
	if err != nil {
		return nil, nil, err
	}
	return archive.Open(store), done, nil
}

// openBlobs opens a store of objects.
func openBlobs(in string, mayMake bool) (store blob.Store, done func(), err error) {
	switch {
	case strings.HasPrefix(in, "s3://"):
		o, err := s3.Parse(in)
		if err != nil {
			return nil, nil, usageError{err}
		}
		var keys *sealed.Keys
		if o.Keys != "" {
			if keys, err = sealed.ReadKeys(o.Keys); err != nil {
				return nil, nil, err
			}
		}
		s, err := s3.Open(o)
		if err != nil {
			return nil, nil, err
		}
		if keys == nil {
			return s, s.Close, nil
		}
		return sealed.New(s, keys), s.Close, nil
	case strings.Contains(in, "://"):
		return nil, nil, usageError{errors.New("an archive is s3://BUCKET/PREFIX or a directory")}
	}
	if _, err := os.Stat(in); err != nil && !mayMake {
		return nil, nil, fmt.Errorf("there is no archive: %w: push makes one", err)
	}
	d, err := blob.OpenDir(in)
	if err != nil {
		return nil, nil, err
	}
	return d, func() {}, nil
}
