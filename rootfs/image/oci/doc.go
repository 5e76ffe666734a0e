// Package oci reads images of registries, of OCI image layouts and of archives, and writes such archives.
package oci
