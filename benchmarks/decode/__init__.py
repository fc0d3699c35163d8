"""`hisparse-pd bench decode`: a decode step of a published shape, part by part, beside what the hardware takes."""
