package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"
)

// Values of --pull.
const (
	pullMissing = "missing"
	pullAlways  = "always"
	pullNever   = "never"
)

// pullFlags say how to take an image from a registry.
type pullFlags struct {
	when      string
	plainHTTP bool
	// tell, if not nil, is also called with the progress.
	tell func(stage string, done, total int64)
}

func (p *pullFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.when, "pull", pullMissing, "take the image from its registry: always, missing or never")
	p.addPlain(cmd)
}

func (p *pullFlags) addPlain(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&p.plainHTTP, "plain-http", false, "talk to the registry without TLS")
}

func (p *pullFlags) check() error {
	switch p.when {
	case pullMissing, pullAlways, pullNever:
		return nil
	}
	return usageError{fmt.Errorf("--pull %q: use %s, %s or %s", p.when, pullAlways, pullMissing, pullNever)}
}

func (a *app) pullCommand() *cobra.Command {
	var (
		p     pullFlags
		quiet bool
	)
	cmd := &cobra.Command{
		Use: "pull IMAGE...", Annotations: makesState, Short: "Take images from a registry",
		Long: `Take images from a registry and make file systems for VMs of them. IMAGE is a name as docker knows
it: python:3.12 is docker.io/library/python:3.12. Credentials and mirrors are docker's:
$DOCKER_CONFIG or ~/.docker/config.json and its helpers, and the "registry-mirrors" of
/etc/docker/daemon.json. "drowse run" pulls what is missing.`,
		Args: cobra.MinimumNArgs(1),
		RunE: a.there(func(cmd *cobra.Command, args []string, at place) error {
			return each(a, args, "pulled", func(ref string) (imageRow, error) { return at.pull(cmd.Context(), ref, p) }, func(w io.Writer, i imageRow) { fmt.Fprintln(w, i.name) })
		}),
	}
	p.addPlain(cmd)
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "")
	_ = cmd.Flags().MarkHidden("quiet") // docker's: only the name goes to stdout anyway
	return cmd
}

// imagesCommand and rmiCommand are docker's short forms.
func (a *app) imagesCommand() *cobra.Command {
	cmd := a.imageListCommand()
	cmd.Use, cmd.Short = "images", `List images, as "drowse image ls"`
	return cmd
}

func (a *app) rmiCommand() *cobra.Command {
	cmd := a.imageRemoveCommand()
	cmd.Use, cmd.Short = "rmi REF...", `Remove images, as "drowse image rm"`
	return cmd
}
